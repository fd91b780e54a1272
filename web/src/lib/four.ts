/** The network of four weights while its story goes on: what a rank has of each weight, gradient and value. */
import type { FourWeights, Story } from './data';
import { bounds } from './layout';
import type { Chapter, Part } from './play';

export interface Network {
  /** By weight; null where the rank does not have it now. */
  weights: (number | null)[];
  fresh: boolean[];
  gradients: (number | null)[];
  summed: boolean[];
  /** h, a and y; null where it is not known now. */
  values: { h: number | null; a: number | null; y: number | null; loss: number | null };
}

/** Which weights a unit has, by their place. */
export const weightsOf = (data: FourWeights, unit: string): number[] =>
  data.layout.slots.flatMap(([name], index) => (name.startsWith(`${unit}.`) ? [index] : []));

function owned(data: FourWeights, rank: number): boolean[] {
  return data.layout.buckets.flatMap((bucket) => {
    const [low, high] = bounds(bucket, rank);
    return Array.from({ length: bucket.numel }, (_, element) => low <= element && element < high);
  });
}

/** After the line `at` of a rank's story. */
export function networkAt(data: FourWeights, number: number, rank: number, at: number): Network {
  const { placements, story } = data.stages[number];
  const { values } = data;
  const own = owned(data, rank);
  const here = own.map((each) => each || !placements.parameters);
  const fresh = own.map(() => false);
  const gradients: (number | null)[] = own.map(() => null);
  const summed = own.map(() => false);
  const known: Network['values'] = { h: null, a: null, y: null, loss: null };
  let stepped = false;
  for (const line of story[rank].slice(0, at + 1)) {
    const some = weightsOf(data, line.unit);
    const each = (change: (index: number) => void) => {
      for (const index of some) change(index);
    };
    if (line.verb === 'gather' && line.state === 'parameters')
      each((index) => {
        here[index] = true;
        fresh[index] ||= stepped;
      });
    else if (line.verb === 'gather')
      each((index) => {
        gradients[index] = values.average[index];
        summed[index] = true;
      });
    else if (line.verb === 'release')
      each((index) => {
        here[index] = own[index];
      });
    else if (line.verb === 'forward' || line.verb === 'recompute') {
      const table = line.verb === 'forward' ? values.forward[rank] : values.recomputed[rank];
      for (const [what, value] of table) if (isOf(what, some)) known[what] = value;
      if (line.verb === 'forward' && some.includes(own.length - 1)) known.loss = values.loss[rank];
    } else if (line.verb === 'reach' && story[rank].some(({ verb }) => verb === 'recompute')) {
      // Checkpointing has kept nothing but the input.
      known.h = known.a = known.y = null;
    } else if (line.verb === 'backward')
      each((index) => {
        gradients[index] = values.gradients[rank][index];
      });
    else if (line.verb === 'reduce')
      each((index) => {
        if (own[index]) {
          gradients[index] = values.average[index];
          summed[index] = true;
        } else if (placements.gradients) gradients[index] = null;
      });
    else if (line.verb === 'step') {
      stepped = true;
      each((index) => {
        fresh[index] = true;
      });
    }
  }
  const weights = here.map((has, index) =>
    has ? (fresh[index] ? values.parameters_after : values.parameters)[index] : null,
  );
  return { weights, fresh, gradients, summed, values: known };
}

const isOf = (what: string, some: readonly number[]): what is 'h' | 'a' | 'y' =>
  what === 'y' ? some.includes(2) : some.includes(0);

/** What flies at a line: from rank to rank, these weights, or their gradients. */
export function flightsAt(
  data: FourWeights,
  lines: readonly Story[],
): { from: number; to: number; weights: number[]; state: string }[] {
  return lines.flatMap((line, from) =>
    (line.verb === 'gather' || line.verb === 'reduce') && line.sent
      ? lines.flatMap((other, to) =>
          to !== from && other.verb === line.verb && other.received
            ? [{ from, to, weights: weightsOf(data, line.unit), state: line.state }]
            : [],
        )
      : [],
  );
}

/** The chapters of a story, by its lines. */
export function chaptersOf(data: FourWeights, number: number, last: number): Part[] {
  const found: Part[] = [];
  data.stages[number].story[0].slice(0, last + 1).forEach(({ verb, state }, at) => {
    const before = found.at(-1)?.chapter ?? 'forward';
    const backward = before !== 'forward' || verb === 'reach' || verb === 'backward';
    let chapter: Chapter = backward ? 'backward' : 'forward';
    if (verb === 'step') chapter = 'stepped';
    else if (verb === 'gather' && state === 'gradients') chapter = 'gathered gradients';
    else if (before === 'stepped') chapter = 'gathered parameters';
    else if (!['forward', 'backward'].includes(before)) chapter = before;
    const part = found.at(-1);
    if (part?.chapter === chapter) part.last = at;
    else found.push({ chapter, first: at, last: at });
  });
  return found;
}
