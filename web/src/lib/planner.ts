/**
 * The planner's closed form: bytes per rank and bytes sent, from three numbers and a recipe.
 *
 * The same arithmetic as `zeroshard/planner/closed.py`, function by function; tests/planner.test.ts compares them on
 * `zeroshard plan --json`. Bytes per parameter are sums of powers of two, so doubles hold every value exactly up to 2^53.
 */
import tables from '../../fixtures/planner.json';

export const TIERS = ['device', 'host', 'nvme'] as const;
export type Tier = (typeof TIERS)[number];

/** Bytes per parameter of each state, in the order shown; what is neither parameters nor gradients is the optimizer's. */
export interface Recipe {
  name: string;
  bytes_per_parameter: { parameters: number; gradients: number; [state: string]: number };
  /** Bytes of one gradient element on its way to the reduction. */
  sent: number;
  /** Are sharded parameters cast from masters, and not kept beside them? (1 or 0) */
  cast: number;
}

/** For each model state: is it sharded over the ranks? */
export interface Placements {
  parameters: boolean;
  gradients: boolean;
  optimizer: boolean;
}

/** Where each model state rests, in whole percent of its bytes; what is missing stays on the device. */
export type Offload = Record<keyof Placements, Partial<Record<'host' | 'nvme', number>>>;

export const ON_DEVICE: Offload = { parameters: {}, gradients: {}, optimizer: {} };
export const PADDING = 'padding';
export const STAGING = 'staging';
const { page: PAGE, buffers: BUFFERS, message: MESSAGE, align: ALIGN } = tables.constants;
const { in_flight: IN_FLIGHT, prefetch: PREFETCH } = tables.constants;

/** Percent of a state's bytes in a tier. */
export function percentIn(offload: Offload, of: keyof Placements, tier: Tier): number {
  const { host = 0, nvme = 0 } = offload[of];
  return { device: 100 - host - nvme, host, nvme }[tier];
}

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
  /** Running sums that replicas hand on, and averages back, on average over the replicas. */
  relay: Moved;
  total: Moved;
}

const NOTHING: Moved = { logical: 0, sent: 0, sent_and_received: 0 };

export interface Question {
  parameters: number;
  ranks: number;
  recipe: Recipe;
  /** Backwards per step. */
  accumulate?: number;
  noSync?: boolean;
  /** K copies of what is sharded, each over ranks / K. */
  replicas?: number;
  offload?: Offload;
  /** The model in so many equal units, for the peak of a step. */
  units?: number;
  /** GPUs of a node, for what their links carry. */
  node?: number;
}

/** What one rank holds at rest and moves in a step. */
export interface StagePlan {
  stage: number;
  formula: string;
  /** Bytes per parameter of each state at rest, on any tier. */
  each: Record<string, number>;
  states: Record<string, number>;
  tiers: Record<Tier, Record<string, number>>;
  total: number;
  /** At rest on the device. */
  device: number;
  traffic: Traffic;
  /** Read from files and written to them in a step. */
  moves: { read: number; written: number };
  /** The most that passes through the device in a step, where units are known; with what rests there, the peak. */
  passing: Passing | null;
  peak: number | null;
  /** What the device saves at rest beside another stage, as a fraction of what that holds in all tiers. */
  saved: (other: StagePlan) => number;
  /** What has to fit the device: the peak, or what is known of it. */
  most: number;
  links: { inside: number; between: number } | null;
  /** Ranks that a copy of the optimizer is cut among. */
  sharing: number;
}

type Kind = keyof Placements;

const kind = (state: string): Kind => (state === 'parameters' || state === 'gradients' ? state : 'optimizer');

/** Elements each rank reserves of a vector that is padded to a multiple of the ranks. */
export const share = (numel: number, ranks: number): number => Math.ceil(numel / ranks);

const MILLION = 1_000_000;

/** The bytes of `numel` elements, `millionths` of them, rounded up: exact, as Python's fractions are. */
export function nbytes(numel: number, each: number, millionths = MILLION): number {
  if (millionths === MILLION) return Math.ceil(numel * each);
  const unit = 2 ** 20; // no recipe has a smaller part of a byte
  const product = BigInt(numel) * BigInt(each * unit) * BigInt(millionths);
  const whole = BigInt(unit) * BigInt(MILLION);
  return Number((product + whole - 1n) / whole);
}

interface State {
  state: string;
  kind: Kind;
  /** Bytes per parameter, and how many millionths of them there are. */
  each: number;
  millionths: number;
}

/** [tier of parameters, tier of the optimizer] in which masters rest in one way. The engine's rule, from its tables. */
const tiersWhere = (masters: Record<Tier, Record<Tier, string>>, how: 'alone' | 'beside'): [Tier, Tier][] =>
  TIERS.flatMap((here) =>
    TIERS.filter((there) => masters[here][there] === how).map((there): [Tier, Tier] => [here, there]),
  );

const ADDED = tiersWhere(tables.masters.none, 'beside');
const CAST = tiersWhere(tables.masters.cast, 'alone');

/** All states. On a GPU, parameters that are updated elsewhere than they rest have a master in their own dtype. */
function statesOf(recipe: Recipe, offload: Offload): State[] {
  const found = Object.entries(recipe.bytes_per_parameter).map(([state, each]) => ({
    state,
    kind: kind(state),
    each,
    millionths: MILLION,
  }));
  const both = ([here, there]: [Tier, Tier]) =>
    percentIn(offload, 'parameters', here) * percentIn(offload, 'optimizer', there);
  const copied = 100 * ADDED.reduce((all, tiers) => all + both(tiers), 0);
  if (copied && !('master' in recipe.bytes_per_parameter))
    found.splice(2, 0, {
      state: 'master',
      kind: 'optimizer',
      each: recipe.bytes_per_parameter.parameters,
      millionths: copied,
    });
  return found;
}

/** Percent of a state's bytes that rests in a tier; of parameters that are cast from masters, nothing. */
function restsIn(recipe: Recipe, place: Placements, offload: Offload, of: Kind, tier: Tier): number {
  const here = percentIn(offload, of, tier);
  if (!(recipe.cast && of === 'parameters' && place.parameters)) return here;
  const least = (there: Tier) => Math.max(here + percentIn(offload, 'optimizer', there) - 100, 0); // in both tiers
  return here - CAST.reduce((all, [from, there]) => all + (from === tier ? least(there) : 0), 0);
}

const pages = (bytes: number): number => Math.ceil(bytes / PAGE) * PAGE;

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
  const states = statesOf(recipe, offload);
  for (const tier of TIERS) {
    let padding = 0;
    for (const { state, kind: of, each, millionths } of states) {
      const part = (millionths / 100) * restsIn(recipe, place, offload, of, tier);
      const bytes = nbytes(place[of] ? own : numel, each, part);
      if (bytes) held[tier][state] = bytes;
      if (place[of]) padding += nbytes(reserved, each, part) - bytes;
    }
    if (padding) held[tier][PADDING] = padding;
  }
  // Files have buffers of one message in host memory.
  const message = Math.min(Math.floor(MESSAGE / recipe.bytes_per_parameter.parameters), numel);
  let buffers = 0;
  for (const { state, kind: of, each, millionths } of states) {
    const slot = pages(nbytes(place[of] ? share(message, ranks) : message, each, millionths));
    buffers += Math.min(BUFFERS * slot, pages(held.nvme[state] ?? 0));
  }
  if (buffers) held.host[STAGING] = buffers;
  return held;
}

export const sum = (table: Record<string, number>): number => Object.values(table).reduce((a, b) => a + b, 0);

/** Bytes per parameter of each state that rests anywhere. */
function restingEach(place: Placements, recipe: Recipe, offload: Offload): Record<string, number> {
  const found: Record<string, number> = {};
  for (const { state, kind: of, each, millionths } of statesOf(recipe, offload)) {
    const percent = TIERS.reduce((all, tier) => all + restsIn(recipe, place, offload, of, tier), 0);
    const nbytes = (each * millionths) / MILLION;
    if (percent) found[state] = percent === 100 ? nbytes : (nbytes * percent) / 100;
  }
  return found;
}

/** `6 + 12/N`: bytes per parameter and rank. */
export function formula(place: Placements, recipe: Recipe, replicas = 1, offload = ON_DEVICE): string {
  let whole = 0;
  let cut = 0;
  for (const [state, nbytes] of Object.entries(restingEach(place, recipe, offload))) {
    if (place[kind(state)]) cut += nbytes;
    else whole += nbytes;
  }
  [whole, cut] = [Number(whole.toFixed(6)), Number(cut.toFixed(6))];
  const over = replicas > 1 ? `*${replicas}/N` : '/N';
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
  replicas = 1,
): Traffic {
  // Each of K replicas reduces and gathers among its N/K ranks, and hands sums on to the next.
  const group = ranks / replicas;
  const part = share(numel, group);
  const [reductions, gathers] = passes(place, accumulate, noSync);
  const [reduced, gathered] = widths(place, recipe, noSync);
  const once = (nbytes: number, own: number, among: number): [number, number, number] => {
    const whole = Math.ceil(own * among * nbytes);
    const each = Math.ceil(own * nbytes);
    return [whole, whole - each, each * (among - 1)]; // in all, to the other owners, from this one
  };
  const [reduceWhole, reduceAway, reduceOwn] = once(reduced, part, group);
  const [gatherWhole, gatherAway, gatherOwn] = once(gathered, part, group);
  const reduce = moved(reduceWhole, reduceAway, reduceOwn, reductions);
  const gather = moved(gatherWhole, gatherOwn, gatherAway, gathers);
  const { gradients } = recipe.bytes_per_parameter;
  const relay = relayed(reductions * nbytes(part, running(gradients)), reductions * nbytes(part, gradients), replicas);
  return { passes: reductions + gathers, reduce, gather, relay, total: added(added(reduce, gather), relay) };
}

/** Bytes of an element of a running sum: what is narrower than fp32 is summed up in it. */
export const running = (gradients: number): number => Math.max(gradients, 4);

/** What is handed on and comes back, per rank and on average: `on` bytes of sums, `back` of averages, K - 1 hops each. */
function relayed(on: number, back: number, replicas: number): Moved {
  if (replicas === 1) return NOTHING;
  const [all, K] = [BigInt(replicas - 1) * (BigInt(on) + BigInt(back)), BigInt(replicas)];
  const sent = Number((all + K - 1n) / K);
  return { logical: on, sent, sent_and_received: 2 * sent };
}

const added = (one: Moved, other: Moved): Moved => ({
  logical: one.logical + other.logical,
  sent: one.sent + other.sent,
  sent_and_received: one.sent_and_received + other.sent_and_received,
});

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
  const cast = (optimizer.master ?? 0) > parameters ? recipe.cast : 0; // only these hold all of a parameter
  return {
    ...recipe,
    name: `${recipe.name}, ${name}`,
    cast,
    bytes_per_parameter: { parameters, gradients, ...optimizer },
  };
}

/** What a step reads from files and writes to them, of a model of so many messages that no buffer is met again. */
function moves(
  onDisk: Record<string, number>,
  place: Placements,
  mastered: boolean,
  accumulate: number,
  noSync: boolean,
  replicas: number,
) {
  const { parameters: whole = 0, gradients: added = 0 } = onDisk;
  const kept = sum(onDisk) - whole - added;
  const backwards = noSync ? 1 : accumulate;
  const again = replicas > 1 ? 1 : backwards; // only the first replica adds to what it has; of the others is told
  // What was cast from masters into a shard is written alone; into a copy or in place, that is read before.
  const published = Number(place.optimizer && !place.parameters);
  return {
    read: whole * (2 * accumulate + Number(!(mastered && place.parameters)) + published) + kept + added * again,
    written: whole * (1 + published) + kept + added * backwards,
  };
}

/** Bytes that pass through the device at one moment, by state. */
export interface Passing {
  moment: 'init' | 'backward' | 'step';
  nbytes: Record<string, number>;
}

/**
 * The most that passes through the device at once in a step of equal units: a bound in closed form, activations not
 * counted. `zeroshard plan --units` counts it message by message, as the engine's own order has it.
 *
 * In backward that is the unit at work, the one just left and those gathered ahead; contributions of a unit and of the
 * messages under way; what arrives for these; and used memory that waits for the next message of its size.
 */
export function mostPassing(question: Question, place: Placements, units: number): Passing {
  const { parameters, recipe, accumulate = 1, noSync: asked = false, replicas = 1, offload = ON_DEVICE } = question;
  const { parameters: each, gradients, master } = recipe.bytes_per_parameter;
  const [ranks, noSync, updated] = [question.ranks / replicas, asked && accumulate > 1, master ?? each];
  const unit = Math.ceil(parameters / units);
  const message = Math.min(unit, Math.floor(MESSAGE / Math.max(Math.round(each), 1)));
  const owned = (numel: number) => up(Math.ceil(up(numel) / ranks));
  const [shard, rest] = [owned(message), unit % message ? owned(unit % message) : 0];
  const messages = Math.ceil(unit / message);
  const of = (width: number) => Math.floor(unit / message) * nbytes(shard * ranks, width) + nbytes(rest * ranks, width);
  const one = (width: number) => nbytes(shard * ranks, width);
  const brought = place.parameters || percentIn(offload, 'parameters', 'device') < 100;

  const width = noSync ? Math.max(gradients, recipe.sent) : recipe.sent;
  const onDevice = percentIn(offload, 'gradients', 'device');
  const inPlace = !place.gradients && (noSync || (accumulate === 1 && gradients === recipe.sent)) && onDevice === 100;
  const under = Math.min(IN_FLIGHT, units * messages - 1); // messages under way before the one that is sent
  const begun = noSync ? units * of(width) : Math.min(of(width) + under * one(width), units * of(width));
  const arrives = nbytes(shard * (ranks > 2 ? ranks : ranks - 1), width);
  const on = nbytes(shard, running(gradients)) + (onDevice === 100 ? 0 : nbytes(shard, gradients));
  const relayed = replicas > 1 ? on * Math.min(2 * IN_FLIGHT + replicas + 1, units * messages) : 0;
  const varying = replicas > 1 || (onDevice > 0 && onDevice < 100) ? 2 * IN_FLIGHT : messages - 1; // else it serves again
  const kept =
    units * messages > IN_FLIGHT + 1
      ? Math.min(2 * IN_FLIGHT, varying) * Math.max(inPlace ? 0 : one(width), arrives)
      : 0;
  const reduce = (inPlace ? 0 : begun) + arrives * (under + 1) + relayed + kept;

  const own = (width: number) => nbytes(place.optimizer ? shard : shard * ranks, width);
  const partly = (of: keyof Placements) => percentIn(offload, of, 'device') < 100;
  const upcast = gradients !== updated && percentIn(offload, 'optimizer', 'device') > 0 ? own(updated) : 0;
  const cast = updated === each ? 0 : (partly('optimizer') ? own(updated) : 0) + (partly('parameters') ? own(each) : 0);
  const passing: Passing[] = [
    { moment: 'init', nbytes: { gather: brought ? of(each) : 0, build: one(updated) } },
    { moment: 'backward', nbytes: { gather: brought ? of(each) * Math.min(PREFETCH + 2, units) : 0, reduce } },
    { moment: 'step', nbytes: upcast > cast ? { upcast } : { cast } }, // averages go before masters come
  ];
  return passing.reduce((most, found) => (sum(found.nbytes) > sum(most.nbytes) ? found : most));
}

const up = (numel: number): number => Math.ceil(numel / ALIGN) * ALIGN;

/** Bytes that one GPU sends in a step inside its node of `node` GPUs, and to others: a gather is a ring, which the cards
 * of a node share; a reduction is an exchange. Of K replicas each is so among its own ranks, which follow one another:
 * a node holds whole replicas, or a replica whole nodes. Sums are handed on in K - 1 hops; those between nodes share the
 * cards of the replicas in a node. */
export function links({ gather, reduce, relay }: Traffic, ranks: number, node: number, replicas = 1) {
  const group = ranks / replicas;
  const near = Math.min(group, node);
  const up = (over: bigint, under: bigint) => Number((over + under - 1n) / under);
  const [ring, exchange, on] = [BigInt(gather.logical), BigInt(reduce.logical), BigInt(relay.sent)];
  const [R, G] = [BigInt(group), BigInt(near)];
  const hops = BigInt(Math.max(replicas - 1, 1));
  const crossed = BigInt(Math.ceil(replicas / Math.max(Math.floor(node / group), 1)) - 1);
  const inside = (R - 1n) * ring + (G - 1n) * exchange; // of R
  const outside = group > near ? (R - 1n) * ring + (R - G) * G * exchange : 0n; // of R * G
  return {
    inside: up(inside * hops + (replicas > 1 ? (hops - crossed) * on * R : 0n), R * hops),
    between: up(outside * hops + (replicas > 1 ? crossed * on * R * G : 0n), R * G * hops),
  };
}

/** One stage's answer. */
export function plan(question: Question, stage: number, place: Placements): StagePlan {
  const { parameters, ranks, recipe, accumulate = 1, noSync = false, replicas = 1, offload = ON_DEVICE } = question;
  const among = ranks / replicas;
  const tiers = atRest(parameters, among, place, recipe, offload);
  const states: Record<string, number> = {};
  const names = statesOf(recipe, offload).map(({ state }) => state);
  for (const state of [...names, STAGING, PADDING])
    for (const tier of TIERS) if (state in tiers[tier]) states[state] = (states[state] ?? 0) + tiers[tier][state];
  const device = sum(tiers.device);
  const moved = traffic(parameters, ranks, place, recipe, accumulate, noSync, replicas);
  const passing = question.units ? mostPassing(question, place, question.units) : null;
  const peak = passing && device + sum(passing.nbytes);
  return {
    stage,
    formula: formula(place, recipe, replicas, offload),
    each: restingEach(place, recipe, offload),
    states,
    tiers,
    total: sum(states),
    device,
    traffic: moved,
    moves: moves(tiers.nvme, place, names.includes('master'), accumulate, noSync, replicas),
    passing,
    peak,
    saved: (other) => 1 - device / (other.total - (other.states[STAGING] ?? 0)),
    most: peak ?? device,
    links: question.node ? links(moved, ranks, question.node, replicas) : null,
    sharing: among,
  };
}

/** The most parameters a double counts one by one. */
export const COUNTABLE = Number.MAX_SAFE_INTEGER;

/** The most parameters whose states fit into `limit` bytes of the device per rank at rest (0: none). Where more than
 * `COUNTABLE` fit, that; where any do, infinity. */
export function largest(ranks: number, place: Placements, recipe: Recipe, limit: number, offload = ON_DEVICE): number {
  const whole = statesOf(recipe, offload).reduce(
    (bytes, { kind: of, each, millionths }) =>
      bytes + (each * millionths * restsIn(recipe, place, offload, of, 'device')) / 1e8,
    0,
  );
  if (!whole) return Number.POSITIVE_INFINITY;
  let low = 0;
  let high = Math.min(Math.ceil((limit * ranks) / whole) + ranks, COUNTABLE);
  while (low < high) {
    const middle = low + Math.ceil((high - low) / 2); // half of low + high: that sum can be more than is countable
    if (sum(atRest(middle, ranks, place, recipe, offload).device) <= limit) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** K copies of what is sharded: elements each rank sends per backward. The total is 2(N-1)/N P for every K. */
export function replicasOf(numel: number, ranks: number, count: number, recipe: Recipe) {
  const { parameters, gradients, ...optimizer } = recipe.bytes_per_parameter;
  const inside = (numel * (ranks - count)) / ranks;
  const between = (numel * 2 * (count - 1)) / ranks;
  const ring = (2 * (ranks - 1) * numel) / ranks; // one replica: every element may cross the slow link
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
