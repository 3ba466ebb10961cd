"use strict";
const views = [];

function show(place) {
  if (place.dataset.shown) return;
  place.dataset.shown = "yes";
  const chart = JSON.parse(place.querySelector("script").textContent);
  vegaEmbed(place, chart, {
    renderer: "svg", downloadFileName: place.dataset.name,
    actions: {export: true, source: false, compiled: false, editor: false},
  }).then(({view}) => {
    views.push([place, view, view.height(), chart.width === "container"]);
    pick(place.closest("section"));
  });
}

// The legend of a study stands for all its charts: the names that are pressed are drawn in full, none pressed: all.
function pick(section) {
  const names = [...section.querySelectorAll(".legend [aria-pressed=true]")].map((button) => button.dataset.name);
  for (const [place, view] of views)
    if (section.contains(place) && "picked" in view.getState().signals) view.signal("picked", names).runAsync();
}

// Numbers by their size, text by the alphabet, what is missing last.
function key(row, column) {
  const cell = row.cells[column], text = cell.dataset.by ?? cell.textContent.trim().replaceAll(",", "");
  return {number: parseFloat(text), text, missing: text === "" || text === "–"};
}

function sort(table, column) {
  const head = table.tHead.rows[0].cells[column], down = head.ariaSort === "ascending";
  const keyed = [...table.tBodies[0].rows].map((row) => [key(row, column), row]);
  const numbers = keyed.every(([own]) => own.missing || !Number.isNaN(own.number));
  keyed.sort(([a], [b]) => a.missing - b.missing
    || (down ? -1 : 1) * (numbers ? a.number - b.number : a.text.localeCompare(b.text)));
  for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  head.ariaSort = down ? "descending" : "ascending";
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}

// On a phone a row is a card, where each cell says the head of its column.
for (const table of document.querySelectorAll(".wide > table")) {
  const heads = [...table.tHead.rows[0].cells].map((head) =>
    [...head.childNodes].map((part) => part.textContent).join(" ").replace(/\s+/g, " ").trim());
  for (const row of table.tBodies[0].rows)
    [...row.cells].forEach((cell, column) => { cell.dataset.label = heads[Math.min(column, heads.length - 1)]; });
  table.classList.add("labelled");
}

for (const table of document.querySelectorAll("table.sortable"))
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, column));
    head.append(button);
  });

// What scrolls sideways can be reached and scrolled with the keyboard.
const reachable = new ResizeObserver((changes) => {
  for (const {target} of changes)
    target.scrollWidth > target.clientWidth ? target.tabIndex = 0 : target.removeAttribute("tabindex");
});
document.querySelectorAll(".wide").forEach((part) => reachable.observe(part));

for (const button of document.querySelectorAll(".legend button"))
  button.addEventListener("click", () => {
    const legend = button.closest(".legend");
    if (button.dataset.name === undefined)
      legend.querySelectorAll("[aria-pressed]").forEach((other) => { other.ariaPressed = "false"; });
    else button.ariaPressed = button.ariaPressed === "true" ? "false" : "true";
    pick(button.closest("section"));
  });

document.querySelectorAll(".chart").forEach((place) => { if (!place.closest("details")) show(place); });
document.querySelectorAll("details").forEach((part) =>
  part.addEventListener("toggle", () => part.open && part.querySelectorAll(".chart").forEach(show)));

// Charts that are only shrunk to the paper's width have letters too small to read; high ones leave pages half empty.
for (const [event, printed] of [["beforeprint", true], ["afterprint", false]])
  addEventListener(event, () => {
    document.documentElement.classList.toggle("printed", printed);
    for (const [, view, height, stretches] of views) {
      if (stretches) view.width(0); // it notices no new place as wide as its area between the axes was
      view.height(printed ? Math.min(height, 420, Math.max(260, .6 * height)) : height);
    }
    dispatchEvent(new Event("resize"));
  });

// A page that follows a study reloads itself: what its reader unfolded, picked and sorted stays.
if (document.querySelector("meta[http-equiv=refresh]")) {
  const sections = [...document.querySelectorAll("section")], own = `basecap ${location.pathname}`;
  const row = (part) => part.closest("tr")?.cells[0].textContent;
  const labelled = (selector, text) => [...document.querySelectorAll(selector)].map((part) =>
    [JSON.stringify([sections.indexOf(part.closest("section")), row(part), text(part)]), part]);
  const folds = labelled("details", (part) => part.querySelector("summary").textContent);
  const names = labelled(".legend [data-name]", (button) => button.dataset.name);
  const heads = labelled("table.sortable > thead th", (head) => [head.closest("thead").textContent, head.cellIndex]);
  const kept = JSON.parse(sessionStorage.getItem(own) ?? "{}");
  for (const [label, part] of folds) part.open ||= kept[label] === "open";
  for (const [label, button] of names) button.ariaPressed = kept[label] ?? button.ariaPressed;
  for (const [label, head] of heads)
    while (kept[label] && head.ariaSort !== kept[label]) sort(head.closest("table"), head.cellIndex);
  addEventListener("pagehide", () => sessionStorage.setItem(own, JSON.stringify(Object.fromEntries([
    ...folds.filter(([, part]) => part.open).map(([label]) => [label, "open"]),
    ...names.map(([label, button]) => [label, button.ariaPressed]),
    ...heads.filter(([, head]) => head.ariaSort).map(([label, head]) => [label, head.ariaSort]),
  ]))));
}
