/** Where an element of the flat vector lives: names, shapes, owners. */
import type { Tensor } from './data';

const GREEK: Record<string, string> = { gamma: 'γ', beta: 'β', sigma: 'σ', mu: 'μ' };

/** `W_vocab` -> ['W', 'vocab'], `gamma1` -> ['γ', '1']: the letter and its index. */
export function symbol(text: string): [base: string, index: string] {
  const match = /^(gamma|beta|sigma|mu|[A-Za-z])_?(\w*)$/.exec(text);
  return match ? [GREEK[match[1]] ?? match[1], match[2]] : [text, ''];
}

export const spoken = (text: string): string => symbol(text).filter(Boolean).join(' ');

export function tensorAt(tensors: Tensor[], element: number): Tensor {
  const found = tensors.find(({ start, numel }) => start <= element && element < start + numel);
  if (!found) throw new Error(`no tensor holds element ${element}`);
  return found;
}

/** [1, 2] of element 6 of a [4, 4] tensor; [6] of a vector. */
export function place(shape: number[], offset: number): number[] {
  const at: number[] = [];
  let rest = offset;
  for (const width of [...shape].reverse()) {
    at.unshift(rest % width);
    rest = Math.floor(rest / width);
  }
  return at;
}

/** `[1, 2]`. */
export const index = (shape: number[], offset: number): string => `[${place(shape, offset).join(', ')}]`;

/** The interval that holds the element. */
export function within<T extends readonly [start: number, stop: number, ...rest: unknown[]]>(
  intervals: readonly T[],
  element: number,
) {
  return intervals.find(([start, stop]) => start <= element && element < stop);
}
