/** A model of the size that people train, beside the 260 parameters on the same scale of bytes per parameter. */
import tables from '../../fixtures/planner.json';
import { plan, type Recipe } from './planner';

export const LARGE = { parameters: 7_000_000_000, ranks: 8, units: 32 } as const;

/** By stage what the planner says that a GPU holds at rest, and at the peak of a step: in bytes. */
export function large(): { stage: number; rest: number; peak: number }[] {
  const recipe = tables.recipes.find(({ name }) => name === 'paper') as unknown as Recipe;
  return tables.stages.map(({ stage, placements }) => {
    const { device, peak } = plan({ ...LARGE, recipe }, stage, placements);
    return { stage, rest: device, peak: peak ?? device };
  });
}
