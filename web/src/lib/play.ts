/**
 * A recorded step as beats: one thing after the other, unit by unit, alike on all ranks.
 *
 * A unit's weights are gathered, it computes, they are released; its gradients travel to their owners; Adam; the new
 * parameters come back. What every rank has after a beat follows from the beats up to it and the layout.
 */
import type { Bucket, Layout, Move, Placements, RankRecording, Recording } from './data';
import { bounds, team, updated } from './layout';
import { passing } from './states';

export type Kind =
  | 'start'
  | 'gather'
  | 'compute'
  | 'release'
  | 'tier'
  | 'reduce'
  | 'land'
  | 'spread'
  | 'adam'
  | 'return'
  | 'rest';
/** Named as the moments of a walkthrough are. */
export type Chapter =
  | 'start'
  | 'forward'
  | 'backward'
  | 'gathered gradients'
  | 'stepped'
  | 'gathered parameters'
  | 'rest';

/** In a row of chapters. */
export const SHORT: Record<Chapter, string> = {
  start: 'Start',
  forward: 'Forward',
  backward: 'Backward',
  'gathered gradients': 'Averages',
  stepped: 'Adam',
  'gathered parameters': 'Return',
  rest: 'End',
};

export interface Beat {
  /** The same on every rank, and at every stage. */
  key: string;
  kind: Kind;
  chapter: Chapter;
  /** What a unit computes (forward, recompute or backward), or how it moves between tiers; otherwise empty. */
  verb: string;
  unit: number;
  buckets: number[];
  /** Weights of a unit that is not the next to compute. */
  ahead: boolean;
  /** The optimizer had its state when the step began: it is not the first. */
  settled: boolean;
  /** By shown rank, as all that follows: when, and the messages that begin here. */
  at: number[];
  moves: Move[][];
}

interface Mark {
  kind: Kind;
  chapter: Chapter;
  verb: string;
  unit: number;
  buckets: number[];
  at: number;
  moves: Move[];
}

/** Between two ranks, elements of the flat vector. */
export interface Flight {
  state: 'parameters' | 'gradients';
  from: number;
  to: number;
  start: number;
  stop: number;
}

/** What one move of a rank takes from a tier to another. */
export interface Crossing {
  state: keyof Placements;
  from: string;
  to: string;
  bucket: number;
  nbytes: number;
}

/** tier: where it rests, if not on the device. */
export type Interval = [start: number, stop: number, what: string, tier?: string];
/** What one rank has: intervals of the flat vector. Parameters are old, gathered or new; gradients own, sum, average; the
 * optimizer's state old or new where it was there when the step began, else made in the step. */
export interface Has {
  parameters: Interval[];
  gradients: Interval[];
  optimizer: Interval[];
}

const CHAPTERS: Partial<Record<Kind, Chapter>> = {
  spread: 'gathered gradients',
  adam: 'stepped',
  return: 'gathered parameters',
};

/** What a copy, a read or a write is in the story: up to the device or down from it, in from files or out to them, a
 * unit's update beside its files, and new parameters that are rounded to 8 bits. Empty: nothing to tell. */
function between(name: string, state: string, sent: number, late: boolean, { rests, computes }: Bucket): string {
  if (name === 'copy' && state === 'master') {
    if (computes && late) return 'cast';
    return rests?.optimizer === 'nvme' ? 'update' : rests?.optimizer && !rests.parameters ? 'up' : '';
  }
  if (!rests) return '';
  const forward = state === 'parameters' && rests.parameters && !late;
  if (name === 'copy') return sent ? 'down' : forward ? 'up' : '';
  return name === 'write' ? 'out' : forward ? 'up' : 'in';
}

const WAYS: Record<string, [from: string, to: string]> = {
  read: ['nvme', 'host'],
  write: ['host', 'nvme'],
  up: ['host', 'device'],
  down: ['device', 'host'],
};

/** All that a shown rank moved from tier to tier in some beats. What rests in files passes through host memory. */
export const crossed = (beats: readonly Beat[], rank: number, recording: Recording, layout: Layout): Crossing[] =>
  beats.flatMap(({ moves, verb }) =>
    moves[rank].flatMap(([done, named, bucket, , nbytes]) => {
      const name = recording.states[named];
      const beside = verb === 'update' && !layout.buckets[bucket].rests?.parameters;
      const [from, to] = WAYS[recording.verbs[done]] ?? WAYS[beside ? 'up' : verb] ?? [];
      const state = name === 'parameters' || name === 'gradients' ? name : 'optimizer';
      return from ? [{ state, from, to, bucket, nbytes }] : [];
    }),
  );

/** What one rank went through. */
function marks(recording: Recording, rank: RankRecording, layout: Layout): Mark[] {
  const found: Mark[] = [];
  const loops = rank.phases.filter(([name]) => ['forward', 'backward', 'step'].includes(name));
  const stepped = loops.find(([name]) => name === 'step')?.[1] ?? Number.POSITIVE_INFINITY;
  const chapter = (kind: Kind, at: number): Chapter => {
    const inside = loops.filter(([, start]) => start <= at && at < stepped).at(-1)?.[0];
    return (
      CHAPTERS[kind] ?? (kind === 'tier' && at >= stepped ? 'stepped' : inside === 'backward' ? 'backward' : 'forward')
    );
  };
  const add = (kind: Kind, at: number, unit: number, move?: Move, verb = '') =>
    found.push({
      kind,
      chapter: kind === 'compute' ? (verb === 'forward' ? 'forward' : 'backward') : chapter(kind, at),
      verb,
      unit,
      buckets: move ? [move[2]] : [],
      at,
      moves: move ? [move] : [],
    });
  const owning = new Set(layout.buckets.map(({ unit }) => unit));
  const gathers: Move[] = [];
  let returned = Number.POSITIVE_INFINITY;
  for (const move of rank.moves) {
    const [verb, state, bucket, unit, , , , start, end] = move;
    const name = recording.verbs[verb];
    if (bucket < 0) continue;
    if (name === 'gather' || name === 'broadcast') {
      const gradients = recording.states[state] === 'gradients';
      const kind = gradients ? 'spread' : start >= stepped ? 'return' : 'gather';
      if (kind === 'gather') gathers.push(move);
      if (kind === 'return') returned = Math.min(returned, start);
      add(kind, start, unit, move);
    } else if (name === 'reduce') add('reduce', start, unit, move);
    else if (name === 'release') add('release', end, unit, move);
    else {
      const how = between(name, recording.states[state], move[5], start >= stepped, layout.buckets[bucket]);
      if (how) add('tier', start, unit, move, how);
      if (start >= stepped && ['up', 'cast'].includes(how)) returned = Math.min(returned, start);
    }
  }
  const updated = new Set(found.flatMap(({ verb, buckets }) => (verb === 'update' ? buckets : [])));
  const apart = layout.buckets.every(({ trainable }, bucket) => !trainable || updated.has(bucket));
  for (const [verb, unit, start, end] of rank.units) {
    if (!owning.has(unit)) continue;
    const name = recording.verbs[verb];
    const own = gathers.filter((move) => move[3] === unit && move[7] >= start && move[8] < end);
    const again = rank.units.filter(
      (each) => name === 'backward' && recording.verbs[each[0]] === 'recompute' && each[1] === unit,
    );
    // Backward comes to a unit, and what it needs is gathered and computed again inside of it.
    const needs = again.filter((each) => each[2] >= start && each[2] < end).map((each) => each[2] + 0.5);
    add('compute', Math.max(start, ...own.map((move) => move[8]), ...needs), unit, undefined, name);
  }
  for (const [name, , end] of rank.phases)
    if (name === 'reduce') add('land', end, -1);
    else if (name === 'step' && !apart) add('adam', Math.min(end, returned - 1), -1);
  return found.sort((one, other) => one.at - other.at);
}

/** Marks of one kind and unit that follow each other are one beat: a unit may have several buckets. */
function together(found: Mark[]): (Mark & { key: string })[] {
  const beats: (Mark & { key: string })[] = [];
  const seen = new Map<string, number>();
  for (const mark of found) {
    const last = beats.at(-1);
    if (last && last.kind === mark.kind && last.unit === mark.unit && last.verb === mark.verb) {
      last.buckets.push(...mark.buckets);
      last.moves.push(...mark.moves);
      last.at = mark.at;
      continue;
    }
    const name = `${mark.kind}:${mark.verb || mark.chapter}:${mark.unit}`;
    const times = (seen.get(name) ?? 0) + 1;
    seen.set(name, times);
    beats.push({ ...mark, key: times > 1 ? `${name}:${times}` : name });
  }
  return beats;
}

/** Does a rank hold a state of the optimizer when the step begins? Before its first step it has masters at most. */
function settledAt({ ranks, states }: Recording): boolean {
  const others = ['parameters', 'gradients', 'fp32_gradients', 'master', 'scales', 'padding', 'step'];
  const is = (state: string) => !others.includes(state) && !passing(state) && state !== 'norms';
  return ranks.some(({ held, span }) =>
    held.some(([at, , state, nbytes]) => at <= span[0] && nbytes > 0 && is(states[state])),
  );
}

/** All beats of a step, in the first shown rank's order. `rest`: the gradients are cleared at the end. */
export function beatsOf(recording: Recording, layout: Layout, rest = false): Beat[] {
  const ranks = recording.ranks.map((rank) => together(marks(recording, rank, layout)));
  const others = ranks.map((beats) => new Map(beats.map((beat) => [beat.key, beat])));
  const settled = settledAt(recording);
  const edge = (kind: 'start' | 'rest', side: 0 | 1): Beat => ({
    key: kind,
    kind,
    chapter: kind,
    verb: '',
    unit: -1,
    buckets: [],
    ahead: false,
    settled,
    at: recording.ranks.map(({ span }) => span[side]),
    moves: recording.ranks.map(() => []),
  });
  const beats: Beat[] = [edge('start', 0)];
  for (const mark of ranks[0] ?? []) {
    const before = beats[beats.length - 1].at;
    const same = others.map((of) => of.get(mark.key));
    beats.push({
      ...mark,
      ahead: false,
      settled,
      at: same.map((of, rank) => Math.max(of?.at ?? 0, before[rank])),
      moves: same.map((of) => of?.moves ?? []),
    });
  }
  if (rest) beats.push(edge('rest', 1));
  beats.forEach((beat, index) => {
    const next = beats.slice(index).find(({ kind }) => kind === 'compute');
    beat.ahead = beat.kind === 'gather' && next !== undefined && next.unit !== beat.unit;
  });
  return beats;
}

export interface Part {
  chapter: Chapter;
  first: number;
  last: number;
}

/** Beats of one chapter after the other. Of several micro-batches each has its own. */
export function parts(beats: readonly Beat[]): Part[] {
  const found: Part[] = [];
  beats.forEach(({ chapter }, index) => {
    const last = found.at(-1);
    if (last?.chapter === chapter) last.last = index;
    else found.push({ chapter, first: index, last: index });
  });
  return found;
}

/** One order for the beats of all stages: keys, each stage's in its own order. */
export function merged(lists: readonly (readonly Beat[])[]): string[] {
  const order: string[] = [];
  for (const beats of lists) {
    let next = 0;
    for (const { key } of beats) {
      const at = order.indexOf(key);
      if (at < 0) order.splice(next, 0, key);
      next = at < 0 ? next + 1 : Math.max(next, at + 1);
    }
  }
  return order;
}

/** For each key of a merged order the last of these beats that is not after it. */
export function followed(order: readonly string[], beats: readonly Beat[]): number[] {
  const place = new Map(beats.map(({ key }, index) => [key, index]));
  let last = 0;
  return order.map((key) => {
    last = Math.max(last, place.get(key) ?? 0);
    return last;
  });
}

/** Where each bucket begins in the flat vector of all of them. */
export function starts(layout: Layout): number[] {
  let sum = 0;
  return layout.buckets.map(({ numel }) => {
    sum += numel;
    return sum - numel;
  });
}

/** What flies in a beat, between the shown ranks of a team: weights from their owners, gradients to them. */
export function flights(beat: Beat, layout: Layout, ranks: readonly number[]): Flight[] {
  const first = starts(layout);
  const found: Flight[] = [];
  const reduce = beat.kind === 'reduce';
  if (!reduce && !['gather', 'return', 'spread'].includes(beat.kind)) return found;
  const state = reduce || beat.kind === 'spread' ? 'gradients' : 'parameters';
  for (const bucket of beat.buckets)
    for (const [owner, rank] of ranks.entries()) {
      const [low, high] = bounds(layout.buckets[bucket], rank);
      if (low >= high) continue;
      const [start, stop] = [first[bucket] + low, first[bucket] + high];
      const of = (at: number) => team(layout.buckets[bucket], ranks[at]);
      for (const other of ranks.keys())
        if (other !== owner && of(other) === of(owner))
          found.push({ state, from: reduce ? other : owner, to: reduce ? owner : other, start, stop });
    }
  return found;
}

/** Bytes that each shown rank had sent and received up to and with a beat, and in it. */
export function counters(beats: readonly Beat[], at: number) {
  const sum = (column: number, from: number) =>
    beats[at].at.map((_, rank) =>
      beats
        .slice(from, at + 1)
        .reduce((all, { moves, kind }) => all + (SILENT.includes(kind) ? 0 : total(moves[rank], column)), 0),
    );
  return { sent: sum(5, 0), received: sum(6, 0), now: { sent: sum(5, at), received: sum(6, at) } };
}
/** No message between ranks. */
const SILENT: readonly Kind[] = ['release', 'tier'];
const total = (moves: readonly Move[], column: number) => moves.reduce((sum, move) => sum + move[column], 0);

type Gradient = 'none' | 'own' | 'sending' | 'sum' | 'average';
interface State {
  whole: boolean[];
  gradients: Gradient[];
  came: boolean[];
  stepped: boolean[];
  /** The new parameters are where they rest. */
  written: boolean[];
}

/** What a shown rank has of each bucket after a beat. */
function stateAt(beats: readonly Beat[], at: number, layout: Layout, rank: number): State {
  const amount = layout.buckets.length;
  const state: State = {
    whole: new Array(amount).fill(false),
    gradients: new Array(amount).fill('none'),
    came: new Array(amount).fill(false),
    stepped: new Array(amount).fill(false),
    written: new Array(amount).fill(false),
  };
  const late = beats.filter(({ kind, chapter }) => kind === 'tier' && chapter === 'stepped');
  const some = (...verbs: string[]) =>
    new Set(late.flatMap(({ verb, buckets }) => (verbs.includes(verb) ? buckets : [])));
  const [alone, waits] = [some('update'), some('up', 'cast')];
  const ends = new Array<number>(amount).fill(0);
  const turn = (from: Gradient, to: Gradient) => {
    state.gradients = state.gradients.map((each) => (each === from ? to : each));
  };
  for (const beat of beats.slice(0, at + 1)) {
    switch (beat.kind) {
      case 'gather':
      case 'release':
        for (const bucket of beat.buckets) state.whole[bucket] = beat.kind === 'gather';
        break;
      case 'compute':
        if (beat.verb === 'backward')
          layout.buckets.forEach(({ unit, trainable }, bucket) => {
            if (unit === beat.unit && trainable) state.gradients[bucket] = 'own';
          });
        break;
      case 'reduce':
        for (const move of beat.moves[rank]) ends[move[2]] = move[8];
        for (const bucket of beat.buckets) state.gradients[bucket] = 'sending';
        break;
      case 'land':
        turn('sending', 'sum');
        break;
      case 'spread':
        for (const bucket of beat.buckets) state.gradients[bucket] = 'average';
        break;
      case 'adam':
        for (let bucket = 0; bucket < amount; bucket += 1)
          if (!alone.has(bucket)) {
            if (state.gradients[bucket] === 'sum') state.gradients[bucket] = 'average';
            state.stepped[bucket] = true;
            state.written[bucket] = !waits.has(bucket);
          }
        break;
      case 'tier':
        if (beat.chapter === 'stepped')
          for (const bucket of beat.buckets) {
            const updates = beat.verb === 'update';
            if (updates) state.gradients[bucket] = 'average';
            // What rests in files is new there once it has been written.
            if (updates ? layout.buckets[bucket].rests?.parameters !== 'nvme' : beat.verb !== 'in')
              state.written[bucket] = !alone.has(bucket) || state.gradients[bucket] === 'average';
            if (beat.verb === 'out') state.stepped[bucket] = state.written[bucket];
          }
        break;
      case 'return':
        for (const bucket of beat.buckets) state.came[bucket] = true;
        break;
      case 'rest':
        state.gradients.fill('none');
    }
  }
  const now = beats[at].at[rank];
  state.gradients = state.gradients.map((each, bucket) => (each === 'sending' && ends[bucket] <= now ? 'sum' : each));
  return state;
}

/** The same as intervals of the flat vector. `rank`: among the shown; `of`: its number. */
export function hasAt(
  beats: readonly Beat[],
  at: number,
  layout: Layout,
  placements: Placements,
  rank: number,
  of = rank,
): Has {
  const state = stateAt(beats, at, layout, rank);
  const has: Has = { parameters: [], gradients: [], optimizer: [] };
  const put = (list: Interval[], start: number, stop: number, what: string, tier?: string) => {
    const last = list.at(-1);
    if (start >= stop) return;
    if (last && last[1] === start && last[2] === what && last[3] === tier) last[1] = stop;
    else list.push(tier ? [start, stop, what, tier] : [start, stop, what]);
  };
  const first = starts(layout);
  layout.buckets.forEach((bucket, index) => {
    const base = first[index];
    const [low, high] = bounds(bucket, of).map((at) => base + at);
    const end = base + bucket.numel;
    /** The rank's own part, and what it has of the rest. */
    const lay = (list: Interval[], own: string, rest: string | null, tier?: string, restsIn?: string) => {
      if (rest) put(list, base, low, rest, restsIn);
      put(list, low, high, own, tier);
      if (rest) put(list, high, end, rest, restsIn);
    };
    const { whole, came } = state;
    const stepped = state.stepped[index] && bucket.trainable;
    const updates = state.written[index] && bucket.trainable;
    const { rests = {} } = bucket;
    const tier = rests.parameters;
    if (whole[index] && tier) put(has.parameters, base, end, 'gathered');
    if (placements.parameters)
      lay(has.parameters, updates ? 'new' : 'old', whole[index] && !tier ? 'gathered' : null, tier);
    else
      lay(
        has.parameters,
        updates ? 'new' : 'old',
        updates && (came[index] || !placements.optimizer) ? 'new' : 'old',
        tier,
        tier,
      );
    const gradient = state.gradients[index];
    if (gradient === 'own' || gradient === 'sending') put(has.gradients, base, end, 'own');
    else if (gradient === 'average' && !placements.optimizer) put(has.gradients, base, end, 'average', rests.gradients);
    else if (gradient !== 'none') lay(has.gradients, gradient, placements.gradients ? null : 'own', rests.gradients);
    const [from, to] = updated(bucket, of).map((at) => base + at);
    const adam = beats[at].settled ? (stepped ? 'new' : 'old') : stepped ? 'made' : null;
    if (adam && bucket.trainable)
      if (placements.optimizer) put(has.optimizer, from, to, adam, rests.optimizer);
      else lay(has.optimizer, adam, adam, rests.optimizer, rests.optimizer);
  });
  return has;
}

const called = (layout: Layout, unit: number): string => (unit < 0 ? '' : layout.units[unit] || 'the root');

/** When the sum of each bucket was at its owners: the last shown owner's time. */
function sumsAt(beats: readonly Beat[], layout: Layout, ranks: readonly number[]): Map<number, [number, number][]> {
  const found = new Map<number, [number, number][]>();
  for (const beat of beats)
    if (beat.kind === 'reduce')
      beat.moves.forEach((moves, shown) => {
        for (const move of moves) {
          const [low, high] = bounds(layout.buckets[move[2]], ranks[shown]);
          if (low < high) found.set(move[2], [...(found.get(move[2]) ?? []), [shown, move[8]]]);
        }
      });
  return found;
}

/** The units whose sums arrive at their owners in this beat: they had not all arrived in the one before. */
export function arriving(beats: readonly Beat[], at: number, layout: Layout, ranks: readonly number[]): string[] {
  if (!at || beats[at].chapter !== 'backward' || beats[at].kind === 'land' || beats[at].verb === 'down') return [];
  // With replicas that is a running sum, which goes on to the next of them.
  if (ranks.some((rank) => rank >= layout.ranks)) return [];
  const sent = new Set(beats.slice(0, at + 1).flatMap(({ kind, buckets }) => (kind === 'reduce' ? buckets : [])));
  const here = (of: readonly [number, number][], beat: number) =>
    of.every(([rank, end]) => end <= beats[beat].at[rank]);
  const units = [...sumsAt(beats.slice(0, at + 1), layout, ranks)]
    .filter(([bucket, of]) => sent.has(bucket) && here(of, at) && !here(of, at - 1))
    .map(([bucket]) => called(layout, layout.buckets[bucket].unit));
  return [...new Set(units)];
}

/** A beat in words, and what arrives in it. */
export function caption(
  beats: readonly Beat[],
  at: number,
  layout: Layout,
  placements: Placements,
  ranks: readonly number[],
): string {
  const units = arriving(beats, at, layout, ranks);
  const some = units.length > 3 ? `${units.length} modules` : units.join(' and ');
  const sums = units.length ? ` The sum of ${some} has arrived at its owner.` : '';
  return `${says(beats[at], layout, placements)}${sums}`;
}

/** What a beat is, in words. */
export function says(beat: Beat, layout: Layout, placements: Placements): string {
  const name = called(layout, beat.unit);
  switch (beat.kind) {
    case 'start':
      return placements.parameters
        ? 'Before the step. Each rank has only its own part of the parameters.'
        : 'Before the step. Each rank has all parameters.';
    case 'gather':
      return beat.ahead
        ? `Prefetch ${name}: its weights are sent ahead of their use.`
        : `Gather ${name}: each owner sends its part of the weights to every rank.${layout.buckets[beat.buckets[0]].computes ? ' Each weight of a matrix takes a byte.' : ''}`;
    case 'tier':
      return {
        up:
          beat.chapter === 'stepped'
            ? `The new parameters of ${name} come up to the device.`
            : `Bring each rank’s part of ${name} up to the device.`,
        down: `Each owner’s sum of ${name} goes down to where gradients rest.`,
        in: `Read the states of ${name} from files into host memory.`,
        update: `Adam updates ${name}, and nothing else.`,
        out: `Write the states of ${name} back to files.`,
        cast: `Each owner rounds its new masters of ${name} to 8 bits.`,
      }[beat.verb] as string;
    case 'compute':
      if (beat.verb === 'forward') return `Compute ${name}, forward: each rank on its own data.`;
      if (beat.verb === 'recompute') return `Compute ${name} once more: backward needs what forward did not keep.`;
      return `Compute ${name}, backward: each rank gets the gradients of its own data.`;
    case 'release':
      return beat.chapter === 'backward'
        ? `Release ${name}: each rank keeps only its own part of the weights. In backward this comes late: a rank keeps the last two modules until it goes on.`
        : `Release ${name}: each rank keeps only its own part of the weights.`;
    case 'reduce':
      return `The gradients of ${name} leave: each rank sends every other the part that it adds up.`;
    case 'land':
      return 'The last gradients arrive. Each owner has the sum of all ranks.';
    case 'spread':
      return `The sums of ${name} are divided by the number of ranks, and go to every rank.`;
    case 'adam':
      return placements.optimizer
        ? 'Adam: each sum is divided by the number of ranks. Each rank updates only its own part.'
        : 'Adam: every rank updates everything.';
    case 'return':
      return `The new parameters of ${name} go from their owner to every rank.`;
    case 'rest':
      return 'After the step. The gradients are cleared.';
  }
}
