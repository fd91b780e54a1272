/**
 * What passes through the device in a step of equal units: the arithmetic of `zeroshard/planner/instants.py`.
 *
 * For a model that uses its units one after the other, in messages of the default size; an upper bound, activations not
 * counted. All units are alike, so a unit is its messages.
 */
import tables from '../../fixtures/planner.json';
import {
  nbytes,
  type Offload,
  ON_DEVICE,
  type Placements,
  percentIn,
  type Question,
  running,
  type Tier,
} from './planner';

const { align: ALIGN, message: MESSAGE, in_flight: IN_FLIGHT, prefetch: PREFETCH } = tables.constants;
const POOL = 2 * IN_FLIGHT; // used buffers kept for the next bucket of that size
/** Buckets above which nobody waits for an answer while typing. */
export const MOST_BUCKETS = 20_000;

export interface Instant {
  name: string;
  nbytes: Record<string, number>;
  total: number;
}

interface Bucket {
  unit: number;
  /** Elements, padding included, and the part of them that each rank has. */
  numel: number;
  shard: number;
  rests: Record<keyof Placements, Tier>;
}

/** Buckets of that many equal units. */
export function bucketCount({ parameters, units = 0, recipe }: Question): number {
  const [message, unit] = messages(parameters, units, recipe.bytes_per_parameter.parameters);
  return units * Math.ceil(unit / message);
}

function messages(numel: number, units: number, each: number): [message: number, unit: number] {
  const unit = Math.ceil(numel / units);
  return [Math.min(unit, Math.floor(MESSAGE / Math.max(Math.round(each), 1))), unit];
}

const up = (numel: number): number => Math.ceil(numel / ALIGN) * ALIGN;

function bucketsOf({
  parameters,
  ranks: all,
  replicas = 1,
  recipe,
  units = 0,
  offload = ON_DEVICE,
}: Question): Bucket[] {
  const ranks = all / replicas;
  const [message, unit] = messages(parameters, units, recipe.bytes_per_parameter.parameters);
  const sizes = new Array<number>(Math.floor(unit / message)).fill(message);
  if (unit % message) sizes.push(unit % message);
  const found: Bucket[] = [];
  for (let number = 0; number < units; number += 1)
    for (const size of sizes) {
      const shard = up(Math.ceil(up(size) / ranks));
      const rests = { parameters: 'device', gradients: 'device', optimizer: 'device' } as const;
      found.push({ unit: number, numel: shard * ranks, shard, rests: { ...rests } });
    }
  for (const state of ['parameters', 'gradients', 'optimizer'] as const) assign(found, state, offload);
  return found;
}

/** Each bucket goes where most is missing, so that tiers alternate. */
function assign(buckets: Bucket[], state: keyof Placements, offload: Offload): void {
  const named = (Object.entries(offload[state]) as [Tier, number][]).filter(([, percent]) => percent > 0);
  const fractions = named.map(([tier, percent]) => ({ tier, wanted: percent / 100, placed: 0 }));
  const rest = 1 - fractions.reduce((sum, { wanted }) => sum + wanted, 0);
  if (percentIn(offload, state, 'device')) fractions.push({ tier: 'device', wanted: rest, placed: 0 });
  let seen = 0;
  for (const bucket of buckets) {
    seen += bucket.numel;
    let chosen = fractions[0];
    for (const each of fractions)
      if (each.wanted * seen - each.placed > chosen.wanted * seen - chosen.placed) chosen = each;
    chosen.placed += bucket.numel;
    bucket.rests[state] = chosen.tier;
  }
}

/** All instants of a step on the device, in the order they come. */
export function instants(question: Question, place: Placements): Instant[] {
  const { recipe, accumulate = 1, noSync = false, units = 0, replicas = 1 } = question;
  const ranks = question.ranks / replicas;
  const buckets = bucketsOf(question);
  const { parameters, gradients, master } = recipe.bytes_per_parameter;
  const updated = master ?? parameters;
  const bytes = ({ numel }: Bucket) => nbytes(numel, parameters);
  const brought = (bucket: Bucket) => place.parameters || bucket.rests.parameters !== 'device';
  const by: Bucket[][] = Array.from({ length: units }, () => []);
  for (const bucket of buckets) by[bucket.unit].push(bucket);
  const whole = by.map((run) => run.filter(brought).reduce((sum, bucket) => sum + bytes(bucket), 0));
  const some = buckets.some(brought);
  const window = (at: number, behind: number, ahead: number) =>
    some ? whole.slice(Math.max(at - behind, 0), at + ahead + 1).reduce((sum, each) => sum + each, 0) : 0;

  const found: Instant[] = [];
  const tell = (name: string, passing: Record<string, number>) => {
    const held = Object.entries(passing).filter(([, each]) => each);
    found.push({ name, nbytes: Object.fromEntries(held), total: held.reduce((sum, [, each]) => sum + each, 0) });
  };
  const most = (values: number[]) => values.reduce((high, each) => Math.max(high, each), 0);
  tell('init', { gather: most(whole), build: most(buckets.map(({ numel }) => nbytes(numel, updated))) });
  for (let at = 0; at < units; at += 1) tell(`forward of units.${at}`, { gather: window(at, 0, PREFETCH) });
  const reduced = reductions(buckets, by, place, {
    ranks,
    replicas,
    gradients,
    sent: recipe.sent,
    accumulate,
    noSync: noSync && accumulate > 1,
  });
  for (let at = units - 1; at >= 0; at -= 1) {
    const gather = window(at, PREFETCH, 1);
    tell(`backward of units.${at}`, { gather, reduce: most(by[at].map((bucket) => reduced.get(bucket) ?? 0)) });
    for (const bucket of [...by[at]].reverse())
      tell(`reduce of bucket ${buckets.indexOf(bucket)}`, { gather, reduce: reduced.get(bucket) ?? 0 });
  }
  tell('step', { upcast: gradients === updated ? 0 : upcast(buckets, place, updated) });
  const published = place.parameters ? [] : buckets.filter(brought).map(bytes);
  tell('gather', { gather: place.optimizer ? most(published) : 0 });
  return found;
}

/** The optimizer gets every gradient in the dtype of what it updates, bucket by bucket. */
function upcast(buckets: Bucket[], place: Placements, updated: number): number {
  let most = 0;
  for (const { rests, shard, numel } of buckets)
    if (rests.optimizer === 'device') most = Math.max(most, place.optimizer ? shard : numel);
  return nbytes(most, updated);
}

interface Sent {
  ranks: number;
  replicas: number;
  gradients: number;
  sent: number;
  accumulate: number;
  noSync: boolean;
}

/** {bucket: bytes of contributions and of what arrives for them when it has been sent}, every one as late as allowed. */
function reductions(buckets: Bucket[], by: Bucket[][], place: Placements, how: Sent): Map<Bucket, number> {
  const { ranks, replicas, gradients, sent, accumulate, noSync } = how;
  const each = noSync ? Math.max(gradients, sent) : sent;
  const inPlace = !place.gradients && (noSync || (accumulate === 1 && gradients === sent));
  const landing = ({ numel, rests }: Bucket) => (inPlace && rests.gradients === 'device' ? null : nbytes(numel, each));
  const receive = ({ shard }: Bucket) => nbytes(shard * (ranks > 2 ? ranks : ranks - 1), each);

  /** A running sum of the own shard; and, where gradients rest elsewhere, what the average comes to. */
  const handedOn = ({ shard, rests }: Bucket) =>
    replicas === 1
      ? []
      : [nbytes(shard, running(gradients)), ...(rests.gradients === 'device' ? [] : [nbytes(shard, gradients)])];

  let pool: number[] = [];
  const take = (bytes: number) => {
    const at = pool.indexOf(bytes);
    if (at >= 0) pool.splice(at, 1);
  };
  const add = (values: number[]) => values.reduce((sum, value) => sum + value, 0);
  let waiting = noSync ? add(buckets.map((bucket) => landing(bucket) ?? 0)) : 0;
  const alive: [number[], number[]][] = [];
  const relayed: number[][] = [];
  const most = new Map<Bucket, number>();
  for (const run of [...by].reverse()) {
    if (!noSync)
      for (const bucket of run) {
        const bytes = landing(bucket);
        waiting += bytes ?? 0;
        if (bytes !== null) take(bytes);
      }
    for (const bucket of [...run].reverse()) {
      const bytes = landing(bucket);
      for (const each of [receive(bucket), ...handedOn(bucket)]) take(each);
      waiting -= bytes ?? 0;
      alive.push([bytes === null ? [receive(bucket)] : [bytes, receive(bucket)], handedOn(bucket)]);
      most.set(bucket, waiting + add(alive.flat().map(add)) + add(relayed.map(add)) + add(pool));
      const give = (used: number) => {
        if (used) pool = [...pool, used].slice(-POOL);
      };
      while (alive.length > IN_FLIGHT) {
        const [done, on] = alive.shift() as [number[], number[]];
        relayed.push(on);
        for (const used of done.reverse()) give(used);
      }
      while (relayed.length > IN_FLIGHT + replicas) for (const used of relayed.shift() as number[]) give(used);
    }
  }
  return most;
}
