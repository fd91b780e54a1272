/** A model of the size that people train, on the GPUs of one machine. */
import { plan, type Recipe, type StagePlan } from './planner';
import { STAGES } from './recipes';

export const LARGE = { parameters: 7_000_000_000, ranks: 8, units: 32 } as const;

/** By stage what the planner says of it. */
export const large = (recipe: Recipe): StagePlan[] =>
  STAGES.map(({ stage, placements }) => plan({ ...LARGE, recipe }, stage, placements));
