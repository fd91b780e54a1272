/**
 * The planner's closed form: bytes per rank and bytes sent, from three numbers and a recipe.
 *
 * The same arithmetic as `zeroshard/planner/closed.py`, function by function; tests/planner.test.ts compares them on
 * `zeroshard plan --json`. Bytes per parameter are sums of powers of two, so doubles hold every value exactly up to 2^53.
 */

export const TIERS = ['device', 'host', 'nvme'] as const;
export type Tier = (typeof TIERS)[number];

/** Bytes per parameter of each state, in the order shown; what is neither parameters nor gradients is the optimizer's. */
export interface Recipe {
  name: string;
  bytes_per_parameter: { parameters: number; gradients: number; [state: string]: number };
  /** Bytes of one gradient element on its way to the reduction. */
  sent: number;
}

/** For each model state: is it sharded over the ranks? */
export interface Placements {
  parameters: boolean;
  gradients: boolean;
  optimizer: boolean;
}

/** Where each model state rests. */
export interface Offload {
  parameters: Tier;
  gradients: Tier;
  optimizer: Tier;
}

export const ON_DEVICE: Offload = { parameters: 'device', gradients: 'device', optimizer: 'device' };
export const PADDING = 'padding';

/** Bytes of one rank in one step, in the three conventions of the literature. */
export interface Moved {
  logical: number;
  sent: number;
  sent_and_received: number;
}

export interface Traffic {
  passes: number;
  reduce: Moved;
  gather: Moved;
  total: Moved;
}

export interface Question {
  parameters: number;
  ranks: number;
  recipe: Recipe;
  /** Backwards per step. */
  accumulate?: number;
  noSync?: boolean;
  /** K copies of the sharded optimizer, each over ranks / K; of stage 1. */
  instances?: number;
  offload?: Offload;
}

/** What one rank holds at rest and moves in a step. */
export interface StagePlan {
  stage: number;
  formula: string;
  states: Record<string, number>;
  tiers: Record<Tier, Record<string, number>>;
  total: number;
  traffic: Traffic;
  /** Ranks that a copy of the optimizer is cut among. */
  sharing: number;
}

type Kind = keyof Placements;

const kind = (state: string): Kind => (state === 'parameters' || state === 'gradients' ? state : 'optimizer');

/** Elements each rank reserves of a vector that is padded to a multiple of the ranks. */
export const share = (numel: number, ranks: number): number => Math.ceil(numel / ranks);

/** Ranks among which a state is cut: each of K instances of the optimizer is cut among N/K of them. */
export function sharing(stage: number, ranks: number, instances = 1): number {
  return stage === 1 && ranks % instances === 0 ? ranks / instances : ranks;
}

/** {tier: {state: bytes}} of the last rank, which holds the padding. Equal sums on all ranks. */
export function atRest(
  numel: number,
  ranks: number,
  place: Placements,
  recipe: Recipe,
  offload: Offload = ON_DEVICE,
): Record<Tier, Record<string, number>> {
  const reserved = share(numel, ranks);
  const own = Math.max(numel - (ranks - 1) * reserved, 0);
  const held: Record<Tier, Record<string, number>> = { device: {}, host: {}, nvme: {} };
  const padding: Record<Tier, number> = { device: 0, host: 0, nvme: 0 };
  for (const [state, nbytes] of Object.entries(recipe.bytes_per_parameter)) {
    const tier = offload[kind(state)];
    const cut = place[kind(state)];
    held[tier][state] = Math.ceil((cut ? own : numel) * nbytes);
    if (cut) padding[tier] += Math.ceil(reserved * nbytes) - held[tier][state];
  }
  for (const tier of TIERS) if (padding[tier]) held[tier][PADDING] = padding[tier];
  return held;
}

export const sum = (table: Record<string, number>): number => Object.values(table).reduce((a, b) => a + b, 0);

/** Bytes that every rank holds at rest, in one tier or all of them. */
export function total(
  numel: number,
  ranks: number,
  place: Placements,
  recipe: Recipe,
  offload = ON_DEVICE,
  tier?: Tier,
): number {
  const held = atRest(numel, ranks, place, recipe, offload);
  return (tier ? [tier] : [...TIERS]).reduce<number>((nbytes, each) => nbytes + sum(held[each]), 0);
}

/** `6 + 12/N`: bytes per parameter and rank. */
export function formula(place: Placements, recipe: Recipe, instances = 1): string {
  let whole = 0;
  let cut = 0;
  for (const [state, nbytes] of Object.entries(recipe.bytes_per_parameter)) {
    if (place[kind(state)]) cut += nbytes;
    else whole += nbytes;
  }
  const over = instances > 1 ? `*${instances}/N` : '/N';
  return [whole ? `${whole}` : '', cut ? `${cut}${over}` : ''].filter(Boolean).join(' + ');
}

/** [reductions, gathers] of the whole model in a step. */
export function passes(place: Placements, accumulate = 1, noSync = false): [number, number] {
  return [noSync ? 1 : accumulate, place.parameters ? 2 * accumulate : 1];
}

/** [reduced, gathered] bytes per element. */
export function widths(place: Placements, recipe: Recipe, noSync = false): [number, number] {
  const { parameters, gradients } = recipe.bytes_per_parameter;
  const added = Math.max(gradients, recipe.sent);
  return [noSync ? added : recipe.sent, place.optimizer ? parameters : added];
}

export function traffic(
  numel: number,
  ranks: number,
  place: Placements,
  recipe: Recipe,
  accumulate = 1,
  noSync = false,
): Traffic {
  const part = share(numel, ranks);
  const [reductions, gathers] = passes(place, accumulate, noSync);
  const [reduced, gathered] = widths(place, recipe, noSync);
  const once = (nbytes: number): [number, number, number] => {
    const whole = Math.ceil(part * ranks * nbytes);
    const own = Math.ceil(part * nbytes);
    return [whole, whole - own, own * (ranks - 1)]; // in all, to the other owners, from this one
  };
  const [reduceWhole, reduceAway, reduceOwn] = once(reduced);
  const [gatherWhole, gatherAway, gatherOwn] = once(gathered);
  const reduce = moved(reduceWhole, reduceAway, reduceOwn, reductions);
  const gather = moved(gatherWhole, gatherOwn, gatherAway, gathers);
  return {
    passes: reductions + gathers,
    reduce,
    gather,
    total: {
      logical: reduce.logical + gather.logical,
      sent: reduce.sent + gather.sent,
      sent_and_received: reduce.sent_and_received + gather.sent_and_received,
    },
  };
}

const moved = (logical: number, sent: number, received: number, times: number): Moved => ({
  logical: times * logical,
  sent: times * sent,
  sent_and_received: times * (sent + received),
});

/** The recipe with another optimizer's states: what the recipe keeps beside them, the master first, stays. */
export function withOptimizer(recipe: Recipe, name: string, states: Record<string, number>): Recipe {
  const { parameters, gradients, ...kept } = recipe.bytes_per_parameter;
  const beside = Object.fromEntries(
    Object.entries(kept).filter(([state]) => ['fp32_gradients', 'master'].includes(state)),
  );
  const others = { ...beside, ...states };
  if (!('master' in beside)) delete others.master; // what is fp32 already needs none
  const optimizer = Object.fromEntries(Object.entries(others).filter(([, nbytes]) => nbytes));
  return { ...recipe, name: `${recipe.name}, ${name}`, bytes_per_parameter: { parameters, gradients, ...optimizer } };
}

/** One stage's answer. */
export function plan(question: Question, stage: number, place: Placements): StagePlan {
  const { parameters, ranks, recipe, accumulate = 1, noSync = false, instances = 1, offload = ON_DEVICE } = question;
  const among = sharing(stage, ranks, instances);
  const tiers = atRest(parameters, among, place, recipe, offload);
  const states: Record<string, number> = {};
  for (const state of [...Object.keys(recipe.bytes_per_parameter), PADDING])
    for (const tier of TIERS) if (state in tiers[tier]) states[state] = (states[state] ?? 0) + tiers[tier][state];
  return {
    stage,
    formula: formula(place, recipe, among < ranks ? instances : 1),
    states,
    tiers,
    total: sum(states),
    traffic: traffic(parameters, ranks, place, recipe, accumulate, noSync),
    sharing: among,
  };
}

/** The most parameters whose states fit into `limit` bytes of the device per rank at rest (0: none). */
export function largest(ranks: number, place: Placements, recipe: Recipe, limit: number, offload = ON_DEVICE): number {
  const whole = Object.entries(recipe.bytes_per_parameter)
    .filter(([state]) => offload[kind(state)] === 'device')
    .reduce((nbytes, [, each]) => nbytes + each, 0);
  if (!whole) return Number.POSITIVE_INFINITY;
  let low = 0;
  let high = Math.ceil((limit * ranks) / whole) + ranks;
  while (low < high) {
    const middle = Math.floor((low + high + 1) / 2);
    if (total(middle, ranks, place, recipe, offload, 'device') <= limit) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** K copies of the sharded optimizer: elements each rank sends per step. The total is 2(N-1)/N P for every K. */
export function instances(numel: number, ranks: number, count: number, recipe: Recipe) {
  const { parameters, gradients, ...optimizer } = recipe.bytes_per_parameter;
  const inside = (numel * (ranks - count)) / ranks;
  const between = (numel * 2 * (count - 1)) / ranks;
  const ring = (2 * (ranks - 1) * numel) / ranks; // one instance: every element may cross the slow link
  return {
    replicas: count,
    optimizer: (sum(optimizer) * count) / ranks,
    reduce_inside: inside,
    reduce_between: between,
    gather_inside: inside,
    saved_per_rank: ring ? 1 - between / ring : 0,
    saved_per_node: ring ? 1 - ((ranks / count) * between) / ring : 0,
    total: inside + between + inside,
  };
}
