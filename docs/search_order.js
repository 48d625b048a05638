// Pages before single names of the code, in the results of the site's search.
var Scorer = {
  score: (result) => result[4],
  objNameMatch: 1,
  objPartialMatch: 1,
  objPrio: { 0: 0, 1: 0, 2: 0 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
