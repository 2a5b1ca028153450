/* Makes elements. Text is only ever set as text, because models, data sets and file names write markup. */
const dom = (() => {
  "use strict";
  const DASHES = ["", "6 3", "2 3", "6 3 2 3", "9 3", "9 3 2 3"];

  /* An element with attributes, listeners (on…) and children; null children are left out. */
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  /* A short piece of a curve, as in a legend. */
  function line(color, dash) {
    const holder = make("span");
    holder.innerHTML =
      '<svg width="26" height="8" aria-hidden="true"><line x1="1" x2="25" y1="4" y2="4" stroke-width="3" ' +
      `stroke="${color}" stroke-dasharray="${DASHES[dash % DASHES.length]}"/></svg>`;
    return holder.firstChild;
  }

  /* Text for plotly, which reads a little markup. */
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  return { make, line, escaped };
})();
