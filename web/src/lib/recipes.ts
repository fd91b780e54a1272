/** Bytes per parameter, as this engine holds them and as others count: this engine's come first. */
import tables from '../../fixtures/planner.json';
import type { Placements, Recipe } from './planner';

export type Told = Recipe & { total: number; says: string };

const told = tables.recipes as unknown as Told[];
const named = (name: string): Told => {
  const found = told.find((each) => each.name === name);
  if (!found) throw new Error(`no recipe ${name} in fixtures/planner.json`);
  return found;
};

export const OURS = named('zeroshard');
export const PAPER = named('paper');
export const RECIPES = [OURS, ...told.filter((each) => each !== OURS)];

/** By stage, what is cut. */
export const STAGES: readonly { stage: number; placements: Placements }[] = tables.stages;
