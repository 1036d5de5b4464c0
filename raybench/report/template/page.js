"use strict";
(() => {
  const table = document.getElementById("cases-table");
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const heads = Array.from(table.tHead.rows[0].cells);
  const form = document.getElementById("filter");
  const shown = document.getElementById("shown");

  // Numbers by their value, text by the alphabet; cells without a number stay below, in either order.
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    if (!("value" in cell.dataset)) return cell.textContent.trim();
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));

  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    button.disabled = false;
    button.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      const isNumber = head.dataset.kind === "number";
      const fresh = !head.hasAttribute("aria-sort");
      const sign = fresh ? (isNumber ? -1 : 1) : direction;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const keyed = rows.map((row) => [keyOf(row, column), row]);
      keyed.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        return sign * compare(a, b);
      });
      body.append(...keyed.map(([, row]) => row));
      say();
    });
  });

  const say = () => {
    const visible = rows.filter((row) => !row.hidden).length;
    const sorted = heads.find((head) => head.hasAttribute("aria-sort"));
    const order = sorted ? `, by ${sorted.textContent.trim()}, ${sorted.getAttribute("aria-sort")}` : "";
    shown.textContent = `${visible} of ${rows.length} cases${order}`;
  };

  const filter = () => {
    const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const track = form.elements.track.value;
    const status = form.elements.status.value;
    rows.forEach((row) => {
      const text = row.textContent.toLowerCase();
      row.hidden =
        (track !== "" && row.dataset.track !== track) ||
        (status !== "" && row.dataset.status !== status) ||
        !words.every((word) => text.includes(word));
    });
    say();
  };

  form.hidden = false;
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  say();
})();
