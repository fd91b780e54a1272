/** Makes what is too large for its place reachable by keyboard: a tab stop where there is something to scroll. */
export function scrolls(node: HTMLElement, label = 'Scrolls') {
  const update = () => {
    const large = node.scrollWidth > node.clientWidth + 1 || node.scrollHeight > node.clientHeight + 1;
    for (const [name, value] of [
      ['tabindex', '0'],
      ['role', 'region'],
      ['aria-label', label],
    ] as const)
      if (large) node.setAttribute(name, value);
      else node.removeAttribute(name);
  };
  update();
  const watcher = new ResizeObserver(update);
  watcher.observe(node);
  for (const child of node.children) watcher.observe(child);
  return { destroy: () => watcher.disconnect() };
}
