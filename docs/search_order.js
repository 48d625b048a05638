// Ranks the results of the site's search for questions in plain language.
//
// Sphinx wants every word of a query on a page. Here any word is enough, and common words of questions do not count.
// A page's points grow with the number and rarity of the words it has: most in its title, fewer in a heading, fewest in
// its text. Sphinx has stemmed the words of its index and of the query.

// Sphinx leaves these out of a query, and out of what it highlights. Its own list lacks them.
stopwords.push(
  ..."about all any can do does don get give given go has have how i is it's its me mean means my need our should so"
    .split(" "),
  ..."some tell them use used using want way we what when where which who why with without work works would you your"
    .split(" ")
);

const TITLE_WEIGHT = 6;
const HEADING_WEIGHT = 2;
const TEXT_WEIGHT = 1;

// Pages that answer a word that their title lacks.
const ANSWERED_BY = {
  min_sep: "docs/explanation/participation",
  max_participations: "docs/explanation/participation",
  continue: "docs/how_to/resume",
  crash: "docs/how_to/resume",
  csv: "docs/how_to/tables",
  parquet: "docs/how_to/tables",
};

// Factor of a page's points: people's pages before those of the code and the records of measurements.
const OF_CODE = /^(reference\/python|tff_dpftrl|benchmarks|experiments|CHANGELOG|CONTRIBUTING|ARCHITECTURE)\b/;
function pageWeight(page) {
  if (OF_CODE.test(page)) return 0.1;
  if (/^docs\/explanation\/(glossary|reading_a_statement)$/.test(page)) return 1.2;
  if (/^docs\/(how_to|explanation)\//.test(page)) return 1.1;
  return /^docs\/README$/.test(page) ? 0.5 : 1;
}

// Words of the index that stand for a word of the query: itself, or those that begin with it.
function entries(terms, word) {
  const own = (name) => (Object.hasOwn(terms, name) ? [terms[name]].flat() : []);
  const found = own(word);
  if (found.length || word.length < 3) return new Set(found);
  return new Set(Object.keys(terms).filter((name) => name.startsWith(word)).flatMap(own));
}

// Returns points by number of page, from Sphinx's index and the stemmed words of a query.
function rankPages(index, words, stem) {
  const lengths = new Map();
  Object.values(index.terms).forEach((pages) =>
    [pages].flat().forEach((page) => lengths.set(page, (lengths.get(page) ?? 0) + 1))
  );
  const mean = [...lengths.values()].reduce((sum, length) => sum + length, 0) / lengths.size;
  const titles = index.titles.map((title) => new Set(splitWords(title).map(stem)));
  const answers = new Map(Object.entries(ANSWERED_BY).map(([word, page]) => [stem(word), page]));
  const points = new Map();
  for (const word of words) {
    const headings = entries(index.titleterms, word);
    const answer = index.docnames.indexOf(answers.get(word));
    const pages = new Set([...entries(index.terms, word), ...headings, answer].filter((page) => page >= 0));
    const rarity = Math.log(1 + index.docnames.length / pages.size);
    for (const page of pages) {
      // A long page has most words by chance.
      let weight = TEXT_WEIGHT / (0.5 + (0.5 * (lengths.get(page) ?? 0)) / mean);
      if (headings.has(page)) weight += HEADING_WEIGHT;
      if (titles[page].has(word) || page === answer) weight += TITLE_WEIGHT;
      points.set(page, (points.get(page) ?? 0) + weight * rarity);
    }
  }
  return points;
}

function splitWords(text) {
  return text.toLowerCase().split(/[^\p{Letter}\p{Number}_]+/u).filter((word) => word);
}

function termsSearch(words) {
  const index = Search._index;
  const stemmer = new Stemmer();
  const points = rankPages(index, words, (word) => stemmer.stemWord(word));
  return [...points].map(([page, sum]) => [
    index.docnames[page], index.titles[page], "", null, sum, index.filenames[page],
  ]);
}

// Titles and names that hold the whole query have points of Sphinx's own, up to 100.
var Scorer = {
  score: ([page, , , , points]) => points * pageWeight(page),
  objNameMatch: 1,
  objPartialMatch: 1,
  objPrio: { 0: 0, 1: 0, 2: 0 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

function replaceSearch() {
  Search.performTermsSearch = termsSearch;
}
if (typeof Search === "undefined") document.addEventListener("DOMContentLoaded", replaceSearch);
else replaceSearch();
