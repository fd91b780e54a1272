/** What a rank held over a step, from the changes that were recorded. */
import type { Bytes, RankRecording, Recording } from './data';

export interface Snapshot {
  at: number;
  /** Bytes by index of state. */
  held: number[];
  total: number;
}

/** One snapshot of a tier per moment at which something changed there, in order; one of nothing where it never did. */
export function snapshots(rank: RankRecording, tier: number, states: number): Snapshot[] {
  const found: Snapshot[] = [];
  let held = new Array<number>(states).fill(0);
  for (const [at, of, state, nbytes] of rank.held) {
    if (of !== tier) continue;
    held = [...held];
    held[state] = nbytes;
    const snapshot = { at, held, total: held.reduce((a, b) => a + b, 0) };
    if (found.at(-1)?.at === at) found[found.length - 1] = snapshot;
    else found.push(snapshot);
  }
  return found.length ? found : [{ at: rank.span[0], held, total: 0 }];
}

/** Index of the snapshot that holds at `time`: the last one not after it. */
export function indexAt(found: Snapshot[], time: number): number {
  let low = 0;
  let high = found.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (found[middle].at <= time) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** For each of `count` equal parts of [start, stop) the fullest snapshot in it: a peak is never lost between pixels. */
export function columns(found: Snapshot[], start: number, stop: number, count: number): Snapshot[] {
  const shown: Snapshot[] = [];
  let next = indexAt(found, start);
  for (let column = 0; column < count; column += 1) {
    const end = start + ((stop - start) * (column + 1)) / count;
    let most = found[next];
    while (next + 1 < found.length && found[next + 1].at < end) {
      next += 1;
      if (found[next].total > most.total) most = found[next];
    }
    shown.push(most);
  }
  return shown;
}

/** The most that a shown rank held in a tier after one time and up to another. */
export function mostWithin(recording: Recording, rank: number, after: number, until: number, tier = 'device'): number {
  const found = snapshots(recording.ranks[rank], recording.tiers.indexOf(tier), recording.states.length);
  const within = found.slice(indexAt(found, after), indexAt(found, until) + 1);
  return Math.max(...within.map(({ total }) => total));
}

/** How many bytes of each state there are more, or less, of those that changed. */
export function changes(before: Bytes, now: Bytes): [state: string, nbytes: number][] {
  return Object.keys({ ...before, ...now })
    .map((state): [string, number] => [state, (now[state] ?? 0) - (before[state] ?? 0)])
    .filter(([, nbytes]) => nbytes);
}

/** Bytes that a shown rank held at a time in a tier, by state; nothing of what was not there. */
export function heldAt(recording: Recording, rank: number, time: number, tier = 'device'): Bytes {
  const held: Bytes = {};
  for (const [at, of, state, nbytes] of recording.ranks[rank].held) {
    if (at > time) break;
    if (recording.tiers[of] === tier) held[recording.states[state]] = nbytes;
  }
  return Object.fromEntries(Object.entries(held).filter(([, nbytes]) => nbytes));
}
