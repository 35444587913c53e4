"use strict";
(function () {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function colours() {
    const style = getComputedStyle(document.documentElement);
    return { text: style.getPropertyValue("--text").trim(), grid: style.getPropertyValue("--grid").trim() };
  }

  function laidOut(layout) {
    const { text, grid } = colours();
    const made = Object.assign({}, layout, {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, family: "system-ui, sans-serif", size: 12 },
      hoverlabel: { font: { size: 11 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: text },
    });
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
      made[key] = Object.assign({ gridcolor: grid, linecolor: grid, automargin: true }, layout[key]);
    }
    return made;
  }

  // By default there is a button that sends a plot's data to the library's makers.
  const config = {
    responsive: true,
    displaylogo: false,
    showSendToCloud: false,
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
  };

  function draw() {
    for (const [key, plot] of Object.entries(plots)) {
      Plotly.react(document.getElementById("plot-" + key), plot.traces, laidOut(plot.layout), config);
    }
  }

  draw();
  dark.addEventListener("change", draw);
})();
