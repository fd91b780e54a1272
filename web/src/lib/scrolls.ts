/** Makes what is too wide for the screen reachable by keyboard, and only that: a tab stop where there is something to scroll. */
export function scrolls(node: HTMLElement, label = 'Scrolls sideways') {
  const update = () => {
    const wide = node.scrollWidth > node.clientWidth + 1;
    for (const [name, value] of [
      ['tabindex', '0'],
      ['role', 'region'],
      ['aria-label', label],
    ] as const)
      if (wide) node.setAttribute(name, value);
      else node.removeAttribute(name);
  };
  update();
  const watcher = new ResizeObserver(update);
  watcher.observe(node);
  for (const child of node.children) watcher.observe(child);
  return { destroy: () => watcher.disconnect() };
}
