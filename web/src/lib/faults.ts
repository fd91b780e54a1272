/** The recorded faults: which losses a beat shows and whether they are the undisturbed run's, and where bytes lie. */
import type { FaultBeat, FaultStory, Faults } from './data';

export const KINDS = [
  ['kill', 'Kill a rank', 'kill -9 in the middle of a step'],
  ['flip', 'Flip a bit', 'of a checkpoint on the disk'],
  ['change', 'Change N', 'load on another number of ranks'],
] as const;

export type Kind = (typeof KINDS)[number][0];

export interface Line {
  name: string;
  /** Of each step: the losses of its micro-batches; null where this run has not come, or began later. */
  cells: ({ losses: number[]; same: boolean } | null)[];
}

const ranks = (count: number) => `${count} rank${count === 1 ? '' : 's'}`;

/** The undisturbed run, the one to which the fault came, and the one that goes on. */
export function lines(faults: Faults, story: FaultStory, beat: FaultBeat): Line[] {
  const steps = Array.from({ length: faults.steps }, (_, step) => step);
  const names = {
    kill: ['until the kill', 'resumed'],
    flip: ['until the flip', 'resumed'],
    change: story.lines.map((line) => ranks(line.ranks)),
  }[story.kind];
  return [
    { name: 'never stopped', cells: steps.map((step) => ({ losses: faults.losses[step], same: true })) },
    ...story.lines.map((line, number) => ({
      name: names[number],
      cells: steps.map((step) => {
        const at = step + 1 - line.first;
        if (at < 0 || at >= beat.shown[number]) return null;
        const losses = line.losses[at];
        return { losses, same: losses.every((loss, index) => Object.is(loss, faults.losses[step][index])) };
      }),
    })),
  ];
}

/** Eight bits of a byte, the highest first. */
export const bits = (byte: number): string[] => [...byte.toString(2).padStart(8, '0')];

/** Intervals of a file as shares of its length, in percent. */
export const shares = (spans: readonly (readonly [number, number])[], nbytes: number) =>
  spans.map(([start, stop]) => ({ left: (100 * start) / nbytes, width: (100 * (stop - start)) / nbytes }));

export const total = (counts: Record<string, number>): number => Object.values(counts).reduce((sum, n) => sum + n, 0);

/** A page of the documents, where the page knows where they are. */
export function document(docs: string | undefined, page: string): string | null {
  return docs && /^(https?:\/\/|\.{0,2}\/)/.test(docs) ? `${docs.replace(/\/?$/, '/')}${page}` : null;
}
