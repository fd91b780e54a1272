/** The document that Python put into the page; web/DATA.md says what is in it. */

export type Bytes = Record<string, number>;

export interface Placements {
  parameters: boolean;
  gradients: boolean;
  optimizer: boolean;
}

export interface Bucket {
  unit: number;
  dtype: string;
  itemsize: number;
  computes?: string;
  trainable: boolean;
  numel: number;
  first: number;
  last: number;
  share?: number;
  bounds?: number[];
  /** Along an axis of the mesh: the ranks of a team, from one of them to the next, and how many teams have rows. */
  size?: number;
  stride?: number;
  parts?: number;
  /** Where the optimizer is sharded over all replicas: where each one's part of each shard begins, and the end. */
  updates?: number[];
  /** The tier of each state that does not rest on the device. */
  rests?: { parameters?: string; gradients?: string; optimizer?: string };
}

export type Slot = [name: string, shape: number[], start: number];

export interface Layout {
  ranks: number;
  align: number;
  units: string[];
  buckets: Bucket[];
  slots: Slot[];
}

/** verb, state, bucket, unit, logical, sent, received, start, end, waited */
export type Move = [number, number, number, number, number, number, number, number, number, number];

export interface Peak {
  at: number;
  total: number;
  held: Bytes;
  rests: Bytes;
  where: string;
  why: Record<string, string>;
  unit: number;
  flying: number[];
}

export interface RankRecording {
  rank: number;
  span: [start: number, stop: number];
  phases: [name: string, start: number, end: number][];
  units: [verb: number, unit: number, start: number, end: number][];
  moves: Move[];
  held: [at: number, tier: number, state: number, nbytes: number][];
  peak: Peak;
  waited: number;
}

export interface Recording {
  clock: 'ns' | 'tick';
  verbs: string[];
  tiers: string[];
  states: string[];
  ranks: RankRecording[];
  note: string | null;
}

export interface Traffic {
  verb: string;
  calls: number;
  logical: number;
  sent: number;
  sent_and_received: number;
}

export type Num = number | 'nan' | 'inf' | '-inf';

export interface Matrix {
  shape: number[];
  values: number[];
}

export interface Correction {
  text: 'A' | 'B' | 'C' | 'D' | 'E';
  at: string;
  says: string;
  right: string;
}

export interface Table {
  title: string;
  lines: { what: string; text_says: string | null; value: number | string; unit: string; agrees: boolean }[];
}

export interface Text {
  text: string;
  title: string;
  recipe: string;
  tables: Table[];
  corrections: string[];
}

export interface Tensor {
  symbol: string;
  name: string;
  layer: string;
  shape: number[];
  start: number;
  numel: number;
  origin: 'text' | 'convention' | 'seed';
  owners: [rank: number, start: number, stop: number][];
}

export interface Adam {
  name: string;
  lr: number;
  beta1: number;
  beta2: number;
  eps: number;
}

export interface Values {
  dtype: { parameters: string; gradients: string; master: string };
  forward: {
    mu: Matrix;
    sigma: Matrix;
    x1: Matrix;
    q: Matrix;
    k: Matrix;
    v: Matrix;
    scores: Matrix;
    weights: Matrix;
    mixed: Matrix;
    attended: Matrix;
    middle: Matrix;
    x2: Matrix;
    hidden: Matrix;
    fed: Matrix;
    last: Matrix;
    logits: Matrix;
    probabilities: Matrix;
    loss: number;
  }[];
  parameters: number[];
  master: number[];
  gradients: number[][];
  sum: number[];
  average: number[];
  exp_avg: number[];
  exp_avg_sq: number[];
  step: number;
  master_after: number[];
  parameters_after: number[];
}

export interface MomentOfRank {
  at: number;
  held: Bytes;
  peak: Peak | null;
  parameters: [start: number, stop: number, age: 'old' | 'new'][];
  gradients: [start: number, stop: number, what: 'own' | 'sum' | 'average'][];
  optimizer: [start: number, stop: number][];
  moves: [first: number, last: number];
}

export interface Moment {
  key: 'start' | 'forward' | 'backward' | 'gathered gradients' | 'stepped' | 'gathered parameters' | 'rest';
  title: string;
  says: string;
  ranks: MomentOfRank[];
}

export interface Stage {
  stage: number;
  placements: Placements;
  formula: string;
  predicted: Bytes[];
  held: Bytes[];
  nbytes: number;
  saved: number;
  owners: Record<'parameters' | 'gradients' | 'optimizer', [rank: number, start: number, stop: number, tier: string][]>;
  traffic: Traffic[][];
  moments: Moment[];
  /** By rank: the most in each phase from the second step on. Of the texts' own step. */
  later?: Record<'forward' | 'backward' | 'step', { total: number; held: Bytes }>[];
  recording: Recording;
}

/** A step that is played beside the texts' own. Of more than two ranks without values: who has what follows from layout
 * and recording. */
export interface Played {
  cut: 'layers' | 'model';
  ranks: number;
  step: number;
  layout: Layout;
  stages: PlayedStage[];
}
export type PlayedStage = Pick<
  Stage,
  'stage' | 'placements' | 'predicted' | 'held' | 'nbytes' | 'saved' | 'traffic' | 'recording'
> & { moments: Pick<Moment, 'key' | 'title' | 'says'>[] };

export interface Grouping {
  frames: {
    names: string[];
    symbols: string[];
    ranks: {
      whole: number;
      transient: number;
      kept: number;
      engine: { gradients: number; reduce: number };
    }[];
  }[];
  peak: { whole: number[]; transient: number[]; kept: number[] };
}

export interface Transformer {
  title: string;
  ranks: number;
  numel: number;
  layout: Layout;
  dims: { width: number; heads: number; inner: number; words: number; tokens: number };
  tensors: Tensor[];
  cuts: number[];
  optimizer: Adam;
  batches: {
    micro_batch: string;
    rank: number;
    x: Matrix;
    x_origin: string;
    targets: number[];
    targets_origin: string;
  }[];
  injected: string[];
  runs: { bf16: Values; float64: Values };
  stages: Stage[];
  /** The values of the second step. */
  second: Transformer['runs'];
  played: Played[];
  backward: { tensor: Grouping; module: Grouping };
  plain: { steps: number; equal: boolean; max_difference: number };
  timing: {
    stage: number;
    verb: string;
    state: string;
    phase: string;
    calls: number;
    logical: number;
    sent: number;
  }[];
  unsent: { elements: number; gradients: number; beside: number; sent: number };
  unchanged: number[];
  corrections: Correction[];
}

export interface Story {
  verb: string;
  unit: string;
  state: string;
  phase: string;
  logical: number;
  sent: number;
  received: number;
  truth: string;
  at: number;
}

export interface FourValues {
  forward: [what: string, value: number][][];
  loss: number[];
  recomputed: [what: string, value: number][][];
  gradients: number[][];
  average: number[];
  exp_avg: number[];
  exp_avg_sq: number[];
  master: number[];
  master_after: number[];
  parameters: number[];
  parameters_after: number[];
  bf16_after: number[];
  loss_after: number[];
  /** By rank: the gradients with respect to y, a and h. */
  flow: [what: string, value: number][][];
  exp_avg_corrected: number[];
  exp_avg_sq_corrected: number[];
  /** By rank: all weights between Adam and the gather, at stages 1 and 2. */
  half_updated: number[][];
  /** By rank: name, master, m and v of each weight that it updates. */
  states: [name: string, master: number, m: number, v: number][][];
}

export interface FourWeights {
  title: string;
  ranks: number;
  layout: Layout;
  names: string[];
  learning_rate: number;
  optimizer: Adam;
  samples: { x: number[]; t: number }[];
  values: FourValues;
  decimals: FourValues;
  stages: {
    stage: number;
    checkpointing: string;
    placements: Placements;
    predicted: Bytes[];
    held: Bytes[];
    nbytes: number;
    traffic: Traffic[][];
    recording: Recording;
    story: Story[][];
  }[];
  checkpointing: {
    how: string;
    says: string;
    gathered: string[];
    recomputed: string[];
    gathered_elements: number;
    reduced_elements: number;
    elements: number;
    passes: number;
  }[];
  tiny: {
    update: number;
    fp16: number;
    weights: { weight: number; fp32_changes: boolean; fp16_changes: boolean }[];
  };
  memory: { step: number; gradient: number[]; kept: number[]; forgotten: number[] }[];
  corrections: Correction[];
}

export interface ThreeLayers {
  title: string;
  ranks: number;
  hidden: number;
  depth: number;
  numel: number;
  padded: Record<string, number>;
  flat: Layout;
  cut: { name: string; element: number; fragments: [rank: number, start: number, stop: number][] };
  window: [start: number, stop: number];
  path: { step: string; says: string; dtype: string; rank: number | null; start: number; values: number[] }[];
  overlap: { layout: Layout; recording: Recording; note: string };
  replicas: {
    ranks: number;
    rows: {
      replicas: number;
      optimizer: number;
      reduce_inside: number;
      reduce_between: number;
      gather_inside: number;
      total: number;
      saved_per_rank: number;
      saved_per_node: number;
      saved_nccl: number;
      saved_gloo: number;
      /** Per parameter in a step at stage 1, of bf16 weights, with sums in bf16 or fp32. */
      bytes: number;
      bytes_fp32: number;
      /** How much less the card sends that sends most. */
      busiest_gloo: number;
      busiest_gloo_fp32: number;
      busiest_nccl: number;
      busiest_nccl_fp32: number;
    }[];
  };
  profile: {
    ranks: number;
    stage: number;
    command: string;
    whole: Profiled;
    scaled: Profiled & { held: ProfiledRank[] };
  };
  corrections: Correction[];
}

/** Bytes of one rank at rest, by state, and the most in each phase of a step. */
export interface ProfiledRank {
  rest: Bytes;
  peaks: Bytes;
}

/** The article's model, or the same at another width: what is planned for each rank, beside one GPU that has it all. */
export interface Profiled {
  parameters: number;
  predicted: ProfiledRank[];
  baseline: { rest: number; peak: number };
  saved: { rest: number; peak: number };
}

export interface Overview {
  title: string;
  stages: {
    stage: number;
    placements: Placements;
    formula: string;
    passes: number;
    counted: { logical: number; passes: number };
    at: { ranks: number; bytes_per_parameter: number; times: number }[];
  }[];
  equality: {
    precision: string;
    stages: { stage: number; weights: string; equal: boolean }[];
    plain: string;
    steps: number;
  };
  tiers: {
    name: string;
    says: string;
    parameters: number;
    ranks: number;
    stage: number;
    device: Bytes;
    host: Bytes;
    nvme: Bytes;
  }[];
  corrections: Correction[];
}

export interface RankSummary {
  rank: number;
  numel: number;
  held: Bytes;
  predicted: Bytes | null;
  tiers: Record<string, Bytes>;
  most: Bytes;
  phases: Record<string, { total: number; held: Bytes }>;
  step: number | null;
  waited: number | null;
  peak: number | null;
}

/** Teams of ranks that share some buckets. axis: its name, empty of what all ranks share or have copies of. */
export interface Group {
  axis: string;
  buckets: number;
  numel: number;
  teams: number[][];
  rows: boolean;
  spread: boolean;
}

export interface Run {
  title: string;
  stage: number;
  ranks: number;
  placements: Placements;
  numel: number;
  facts: Record<string, string | number>;
  dtypes: { parameters: string; gradients: string; master: string; buckets: number }[];
  layout: Layout;
  groups: Group[];
  summary: RankSummary[];
  recording: Recording | null;
  traffic: Traffic[];
  curves: { columns: string[]; rows: (Num | null)[][]; note: string | null } | null;
}

export interface ShownRun {
  name: string;
  says: string;
  run: Run;
}

/** Recorded faults: what the engine did when a rank was killed, a bit flipped, or the number of ranks changed. */
export interface Faults {
  ranks: number;
  stage: number;
  steps: number;
  every: number;
  micro_batches: number;
  losses: number[][];
  stories: FaultStory[];
}
export interface FaultStory {
  kind: 'kill' | 'flip' | 'change';
  name: string;
  label: string;
  lines: { ranks: number; first: number; losses: number[][] }[];
  beats: FaultBeat[];
}
export interface FaultBeat {
  key: string;
  short: string;
  title: string;
  says: string;
  states: ('works' | 'gone' | 'raised')[];
  shown: number[];
  files: { name: string; beside: boolean; files: Record<string, number>; manifest: boolean }[];
  said?: { who: string; ranks: number[]; text: string; code?: number }[];
  flip?: Flip;
  reads?: { files: Record<string, [start: number, stop: number][]>; states: Record<string, number> }[];
}
export interface Flip {
  checkpoint: string;
  file: string;
  nbytes: number;
  at: number;
  bit: number;
  bytes: [before: number, after: number];
  tensor: { name: string; state: string; element: number } | null;
  was: number | null;
  becomes: number | null;
}

export interface Walkthroughs {
  faults: Faults;
  runs: ShownRun[];
  transformer: Transformer;
  four: FourWeights;
  layers: ThreeLayers;
  overview: Overview;
  texts: Record<'A' | 'B' | 'C' | 'D' | 'E', Text>;
}

/** What two runs of `zeroshard train` have in common, beside what each of them tells. */
export interface Compared {
  names: [string, string];
  steps: [number, number];
  /** Losses and norms that both have. */
  compared: number;
  differs: { step: number; losses: [number, number] } | null;
  /** Digests of the full weights; null where a run has not ended. */
  weights: [string | null, string | null];
  equal: boolean;
}

export interface Page {
  format: 'zeroshard-page';
  version: number;
  zeroshard: string;
  walkthroughs: Walkthroughs | null;
  run: Run | null;
  /** A second run, and what it shares with the first. */
  other?: Run;
  compared?: Compared;
  /** What the footer links to: by the package's metadata, or by whoever wrote the page. */
  links?: Record<string, string>;
}

const VERSION = 1;

/** The document; null in the bare template. Throws an `Error` that says what is wrong with any other content. */
export function read(text: string): Page | null {
  const page = JSON.parse(text) as Page | null;
  if (page === null) return null;
  if (page.format !== 'zeroshard-page' || page.version !== VERSION)
    throw new Error(
      `The data in this page is ${page.format ?? 'of no known format'}, version ${page.version ?? 'unknown'}; ` +
        `this page reads zeroshard-page, version ${VERSION}. Write the page again with one zeroshard.`,
    );
  return page;
}
