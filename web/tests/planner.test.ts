import { readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import tables from '../fixtures/planner.json';
import * as planner from '../src/lib/planner';

/** `zeroshard plan --json` on random questions: what the calculator must give to the byte. */
const golden = JSON.parse(readFileSync(new URL('../fixtures/plan-golden.json', import.meta.url), 'utf8'));

interface Asked {
  params: number | string;
  ranks?: number;
  preset?: string;
  optimizer?: string;
  accumulate?: number;
  no_sync?: boolean;
  replicas?: number;
  gpu_mem?: string;
  bytes?: string;
  gpus_per_node?: number;
  units?: number;
  offload?: Record<keyof planner.Placements, string | Record<string, number>>;
}

const answered = golden.cases as { asked: Asked; plan: { stages: Stage[]; replicas: Replicas } }[];

interface Stage {
  stage: number;
  bytes_per_parameter: string;
  states: Record<string, number>;
  total: number;
  saved: number;
  tiers: Record<string, Record<string, number>>;
  traffic: planner.Traffic & { recompute: planner.Moved };
  moves: planner.StagePlan['moves'];
  links: planner.StagePlan['links'];
  peak: number | null;
  fits: boolean | null;
  largest: number | null;
}
type Replicas = Record<string, number> | null;

const placements = new Map(tables.stages.map(({ stage, placements }) => [stage, placements]));

/** As `zeroshard.Offload` takes it, in whole percent. */
function offload(asked: Asked): planner.Offload | undefined {
  const percents = (where: string | Record<string, number>) => {
    const parts = typeof where === 'string' ? { [where]: 1 } : where;
    return { host: Math.round(100 * (parts.cpu ?? 0)), nvme: Math.round(100 * (parts.nvme ?? 0)) };
  };
  return (
    asked.offload && {
      parameters: percents(asked.offload.parameters),
      gradients: percents(asked.offload.gradients),
      optimizer: percents(asked.offload.optimizer),
    }
  );
}

/** `80GiB` in bytes. */
function budget(text: string): number {
  const [, amount, letter, binary] = /^([\d.]+)([KMGT])(i?)B$/.exec(text) as string[];
  return Math.floor(Number(amount) * (binary ? 1024 : 1000) ** ('KMGT'.indexOf(letter) + 1));
}

/** `parameters=2,gradients=2,m=1/2` */
function custom(text: string): planner.Recipe {
  const states = text.split(',').map((word) => {
    const [state, amount] = word.split('=');
    const [over, under = '1'] = amount.split('/');
    return [state, Number(over) / Number(under)];
  });
  const table = Object.fromEntries(states);
  return { name: text, bytes_per_parameter: table, sent: table.parameters, cast: 0 };
}

function question(asked: Asked): planner.Question {
  const recipes = tables.recipes as unknown as planner.Recipe[];
  const named = recipes.find(({ name }) => name === asked.preset) as planner.Recipe;
  const found = asked.bytes ? custom(asked.bytes) : named;
  const optimizers = tables.optimizers as Record<string, Record<string, number>>;
  return {
    parameters: Number(asked.params),
    ranks: asked.ranks ?? 1,
    recipe: asked.optimizer ? planner.withOptimizer(found, asked.optimizer, optimizers[asked.optimizer]) : found,
    accumulate: asked.accumulate,
    noSync: asked.no_sync,
    replicas: asked.replicas,
    units: asked.units,
    node: asked.gpus_per_node,
    offload: offload(asked),
  };
}

/** A state of no bytes may be listed or not. */
const held = (states: Record<string, number>) => Object.fromEntries(Object.entries(states).filter(([, n]) => n > 0));
/** And a tier of none. */
const tiers = (found: Record<string, Record<string, number>>) =>
  Object.fromEntries(
    Object.entries(found)
      .map(([tier, states]) => [tier, held(states)] as const)
      .filter(([, states]) => Object.keys(states).length),
  );

describe('the closed form', () => {
  test('has a few hundred questions to answer', () => {
    expect(answered.length).toBeGreaterThanOrEqual(200);
  });

  test.each(answered.map(({ asked, plan }) => [JSON.stringify(asked), asked, plan] as const))(
    '%s',
    (_, asked, plan) => {
      const asks = question(asked);
      for (const expected of plan.stages) {
        const place = placements.get(expected.stage) as planner.Placements;
        const found = planner.plan(asks, expected.stage, place);
        const { recompute: _none, ...traffic } = expected.traffic;
        expect({
          formula: found.formula,
          states: held(found.states),
          total: found.total,
          tiers: tiers(found.tiers),
          traffic: found.traffic,
          moves: found.moves,
          links: found.links,
        }).toEqual({
          formula: expected.bytes_per_parameter,
          states: held(expected.states),
          total: expected.total,
          tiers: tiers(expected.tiers),
          traffic,
          moves: expected.moves,
          links: expected.links,
        });
        expect(found.peak === null).toBe(expected.peak === null);
        if (found.peak !== null && expected.peak !== null) {
          expect(found.peak).toBeGreaterThanOrEqual(expected.peak);
          const split = Object.values(asks.offload ?? {}).some(({ host = 0, nvme = 0 }) => (host + nvme) % 100);
          expect(found.peak).toBeLessThanOrEqual(expected.peak * (split ? 1.7 : 1.4)); // one that says nothing would pass
        }
        expect(found.saved(planner.plan(asks, 0, placements.get(0) as planner.Placements))).toBeCloseTo(
          expected.saved,
          12,
        );
        if (asked.gpu_mem) {
          const limit = budget(asked.gpu_mem);
          expect(found.most <= limit).toBe(expected.fits);
          expect(planner.largest(found.sharing, place, asks.recipe, limit, asks.offload)).toBe(
            expected.largest ?? Number.POSITIVE_INFINITY,
          );
        }
      }
      if (asked.replicas) {
        const found = planner.replicasOf(asks.parameters, asks.ranks, asked.replicas, asks.recipe);
        // Python rounds each fraction once; products of doubles round twice.
        for (const [key, value] of Object.entries(plan.replicas as Record<string, number>))
          expect(found[key as keyof typeof found], key).toBeCloseTo(value, value > 1 ? -Math.log10(value * 1e-14) : 13);
      }
    },
  );
});

/** As tests/tools/test_planner.py has it: the first that fits while the next does not. */
describe('the largest model', () => {
  const recipes = tables.recipes as unknown as planner.Recipe[];
  const fits = (numel: number, ranks: number, place: planner.Placements, recipe: planner.Recipe, limit: number) =>
    planner.sum(planner.atRest(numel, ranks, place, recipe).device) <= limit;
  const asked = [...placements].flatMap(([stage, place]) =>
    [1024, 838_861, 1_000_000, 2 ** 20, 2 ** 24].flatMap((ranks) =>
      [80, 81_920].map((gib) => [stage, ranks, gib, place] as const),
    ),
  );

  test.each(asked)('at stage %i on %i ranks of %i GiB', (_, ranks, gib, place) => {
    const limit = gib * 2 ** 30;
    for (const recipe of recipes) {
      const most = planner.largest(ranks, place, recipe, limit);
      expect(fits(most, ranks, place, recipe, limit)).toBe(true);
      expect(most === planner.COUNTABLE || !fits(most + 1, ranks, place, recipe, limit)).toBe(true);
    }
  });

  test('is not written out beyond what a double counts', () => {
    const place = placements.get(3) as planner.Placements;
    expect(planner.largest(2 ** 24, place, recipes[0], 80 * 2 ** 30)).toBe(planner.COUNTABLE);
    expect(planner.largest(2 ** 20, place, recipes[0], 80 * 2 ** 30)).toBe(2 ** 20 * 5 * 2 ** 30);
  });
});
