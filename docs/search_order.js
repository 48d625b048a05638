// Pages for people before those of the code, and the glossary first, in the results of the site's search.
var Scorer = {
  score: ([page, , , , points]) =>
    /^(reference\/python|tff_dpftrl|CHANGELOG)\b/.test(page)
      ? points / 10
      : points +
        (/^docs\/explanation\/(glossary|reading_a_statement)$/.test(page) ? 2 : 0) +
        (/^docs\/(how_to|explanation)\//.test(page) ? 1 : 0),
  objNameMatch: 1,
  objPartialMatch: 1,
  objPrio: { 0: 0, 1: 0, 2: 0 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
