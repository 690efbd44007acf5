"use strict";
// Draws every chart of the page: those in a closed <details> when it opens, for what is hidden has no width.
// Expressions are interpreted (ast), so the page's policy need not allow eval.
document.documentElement.classList.add("js");
const config = JSON.parse(document.getElementById("chart-config").textContent);

async function draw(figure) {
  const place = figure.querySelector(".chart");
  if (place.dataset.state) return;
  place.dataset.state = "drawing";
  try {
    const spec = JSON.parse(figure.querySelector("script").textContent);
    const options = { actions: false, ast: true, config, defaultStyle: false, renderer: "svg", tooltip: { disableDefaultStyle: true } };
    await vegaEmbed(place.firstElementChild, spec, options);
    place.dataset.state = "drawn";
  } catch (error) {
    place.dataset.state = "failed";
    place.classList.add("failed");
    place.textContent = `This chart could not be drawn: ${error}`;
  }
}

async function drawAll(root) {
  for (const figure of root.querySelectorAll("figure")) {
    if (!figure.closest("details:not([open])")) await draw(figure);
  }
}

for (const details of document.querySelectorAll("details")) {
  details.addEventListener("toggle", () => details.open && drawAll(details));
}
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
drawAll(document);
