"use strict";
// Sorting: the button in a header sorts its table by that column, once more the other way round.
for (const table of document.querySelectorAll("table.sortable")) {
  const headers = [...table.tHead.rows[0].cells];
  headers.forEach((header, index) => {
    header.querySelector("button").addEventListener("click", () => {
      const up = header.getAttribute("aria-sort") !== "ascending";
      for (const each of headers) each.setAttribute("aria-sort", "none");
      header.setAttribute("aria-sort", up ? "ascending" : "descending");
      const body = table.tBodies[0];
      const keyed = [...body.rows].map((row) => {
        const cell = row.cells[index];
        const value = cell.dataset.v;
        return { row, key: value === undefined ? cell.textContent : value === "" ? null : Number(value) };
      });
      keyed.sort((one, other) => {
        // What has no value stays at the end either way.
        if (one.key === null || other.key === null) return (one.key === null) - (other.key === null);
        const order = typeof one.key === "number" ? one.key - other.key : one.key.localeCompare(other.key);
        return up ? order : -order;
      });
      body.append(...keyed.map((each) => each.row));
    });
  });
}

// Filters: a line stays where it has every value chosen; what has no such value is no concern of the filter.
const form = document.querySelector("form.filters");
const output = form.querySelector("output");
const lines = [...document.querySelectorAll("table.sortable tbody tr")];
const others = [...document.querySelectorAll("figure[data-model], details[data-model], article[data-task]")];
const NAMES = ["model", "method", "task"];

function matches(element, chosen) {
  return NAMES.every((name) => !chosen[name] || !element.dataset[name] || element.dataset[name] === chosen[name]);
}

function filter() {
  const chosen = Object.fromEntries(new FormData(form));
  const find = (chosen.find || "").trim().toLowerCase();
  let shown = 0;
  for (const line of lines) {
    const stays = matches(line, chosen) && (!find || line.textContent.toLowerCase().includes(find));
    line.hidden = !stays;
    shown += stays;
  }
  for (const each of others) each.hidden = !matches(each, chosen);
  output.value = shown === lines.length ? "" : `${shown} of ${lines.length} lines shown`;
}

form.addEventListener("input", filter);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(filter));
filter();
