/** Makes what is too large for its place reachable by keyboard: a tab stop where there is something to scroll. And
 * seen: `data-more` while there is something to the right. */
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
  const more = () => node.toggleAttribute('data-more', node.scrollLeft + node.clientWidth < node.scrollWidth - 1);
  const look = () => {
    update();
    more();
  };
  look();
  node.addEventListener('scroll', more, { passive: true });
  const watcher = new ResizeObserver(look);
  watcher.observe(node);
  for (const child of node.children) watcher.observe(child);
  return { destroy: () => watcher.disconnect() };
}

/** Scrolls a strip so that one of what lies in it is in its middle, as far as there is something to scroll. */
export function centre(strip: HTMLElement, item: HTMLElement | null | undefined) {
  if (item) strip.scrollLeft = item.offsetLeft - strip.offsetLeft - (strip.clientWidth - item.offsetWidth) / 2;
}
