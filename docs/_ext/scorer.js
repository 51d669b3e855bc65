// How the search ranks pages: Sphinx puts this file into language_data.js (html_search_scorer).
// Records of the project mention every word, so they come after the pages that explain it.
var Scorer = {
  score: ([page, , , , score]) => {
    if (/^(project\/|decisions$|verified$|architecture$)/.test(page)) return score / 10;
    return /^(how-to|concepts|errors|backends)\//.test(page) ? score + 1 : score;
  },

  // Sphinx's own numbers, from its searchtools.js.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
