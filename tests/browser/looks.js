/* What is wrong with how a page looks, one sentence each. `within`: the part to measure; `legible`: the least contrast. */
([within, legible]) => {
  const found = [];
  const shown = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const said = (element) => `${element.tagName.toLowerCase()} "${element.textContent.trim().slice(0, 40)}"`;
  const { scrollWidth } = document.documentElement;
  if (scrollWidth > innerWidth) found.push(`the page is ${scrollWidth} wide in a window of ${innerWidth}`);

  // Contrast, as WCAG 2 defines it
  const channels = (color) => { const [r, g, b, a = 1] = color.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = ([r, g, b, a], below) => [r, g, b].map((value, at) => a * value + (1 - a) * below[at]);
  const light = (color) => {
    const [r, g, b] = color.map((value) => value / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  function contrast(element) {
    const layers = [];
    let opacity = 1;
    for (let at = element; at; at = at.parentElement) {
      const style = getComputedStyle(at), ground = style.backgroundColor;
      opacity *= Number(style.opacity);
      if (ground.startsWith("rgb")) layers.push(channels(ground));
    }
    const ground = layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
    const style = getComputedStyle(element);
    const [r, g, b, a] = channels(element.closest("svg") ? style.fill : style.color);
    const [bright, dim] = [light(over([r, g, b, a * opacity], ground)), light(ground)].sort((x, y) => y - x);
    return (bright + 0.05) / (dim + 0.05);
  }
  const root = document.querySelector(within);
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const texts = new Set();
  while (walker.nextNode()) if (walker.currentNode.textContent.trim()) texts.add(walker.currentNode.parentElement);
  for (const element of texts) {
    if (element.closest("script, style, noscript") || !shown(element)) continue;
    const ratio = contrast(element);
    if (ratio < legible) found.push(`${said(element)} has a contrast of ${ratio.toFixed(2)}`);
  }

  // What stands side by side
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  function apart(elements) {
    const boxes = elements.filter(shown).map((element) => [element, element.getBoundingClientRect()]);
    boxes.forEach(([one, box], at) => boxes.slice(at + 1).forEach(([other, next]) => {
      if (meet(box, next)) found.push(`${said(one)} and ${said(other)} overlap`);
    }));
  }
  for (const box of root.querySelectorAll(".top, .panel > header, .controls, thead tr")) apart([...box.children]);

  // Plots: something is drawn, labels are whole and apart
  for (const plot of root.querySelectorAll(".plot")) {
    if (!plot.querySelector(".trace path, .point path")) found.push(`${plot.id} is empty`);
    const frame = plot.getBoundingClientRect();
    for (const text of plot.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      const whole = box.left >= frame.left - 1 && box.right <= frame.right + 1 && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
      if (box.width && !whole) found.push(`${plot.id}: ${said(text)} is cut off`);
    }
    for (const axis of [".xtick > text", ".ytick > text"]) {
      const labels = [...plot.querySelectorAll(axis)];
      if (labels.length < 2 && !plot.querySelector(".barlayer .point")) found.push(`${plot.id} has ${labels.length} ${axis}`);
      apart(labels);
    }
  }
  return [...new Set(found)];
}
