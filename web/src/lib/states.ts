/** How each state is called and coloured, everywhere alike. */

const KNOWN: Record<string, [label: string, colour: string, passing?: true]> = {
  parameters: ['parameters', 'var(--parameters)'],
  gradients: ['gradients', 'var(--gradients)'],
  fp32_gradients: ['fp32 gradients', 'var(--gradients)'],
  master: ['master weights', 'var(--master)'],
  exp_avg: ['Adam’s m', 'var(--exp_avg)'],
  exp_avg_sq: ['Adam’s v', 'var(--exp_avg_sq)'],
  m: ['Adam’s m', 'var(--exp_avg)'],
  v: ['Adam’s v', 'var(--exp_avg_sq)'],
  momentum: ['momentum', 'var(--exp_avg)'],
  momentum_buffer: ['momentum', 'var(--exp_avg)'],
  scales: ['scales', 'var(--other)'],
  step: ['step counters', 'var(--step)'],
  padding: ['padding', 'var(--other)'],
  norms: ['map for the norm', 'var(--norms)'],
  gather: ['gathered parameters', 'var(--parameters)', true],
  prefetch: ['prefetched parameters', 'var(--prefetch)', true],
  reduce: ['reduction buffers', 'var(--gradients)', true],
  staging: ['buffers of what rests elsewhere', 'var(--other)', true],
  lent: ['copies that other ranks read', 'var(--master)', true],
  snapshot: ['copy to be saved', 'var(--other)', true],
  upcast: ['fp32 gradients of the step', 'var(--gradients)', true],
  cast: ['masters being cast', 'var(--master)', true],
  build: ['being built', 'var(--other)', true],
};

/** Where bytes are held, in the engine's words and in the reader's. */
export const TIER_NAMES: Record<string, string> = { device: 'device', host: 'host memory', nvme: 'files' };

export const ORDER = Object.keys(KNOWN);

export const label = (state: string): string => KNOWN[state]?.[0] ?? state;
export const colour = (state: string): string => KNOWN[state]?.[1] ?? 'var(--other)';
/** Passing states live for a moment and are drawn hatched. */
export const passing = (state: string): boolean => KNOWN[state]?.[2] ?? false;

/** States in the order shown; those the page has no word for come last, as they are named. */
export function sorted(states: Iterable<string>): string[] {
  const place = (state: string) => (state in KNOWN ? ORDER.indexOf(state) : ORDER.length);
  return [...states].sort((a, b) => place(a) - place(b));
}

/** A CSS background: the state's colour, hatched where it only passes through. */
export function paint(state: string): string {
  if (!passing(state)) return colour(state);
  return `repeating-linear-gradient(135deg, var(--hatch) 0 1.5px, transparent 1.5px 5px), ${colour(state)}`;
}
