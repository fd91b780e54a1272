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
  instances?: number;
  gpu_mem?: string;
  bytes?: string;
}

// `gpus_per_node` asks about links, which the calculator does not show; the rest of such an answer is compared too.
const answered = golden.cases as { asked: Asked; plan: { stages: Stage[]; instances: Instances } }[];

interface Stage {
  stage: number;
  bytes_per_parameter: string;
  states: Record<string, number>;
  total: number;
  traffic: planner.Traffic & { recompute: planner.Moved };
  fits: boolean | null;
  largest: number | null;
}
type Instances = Record<string, number> | null;

const placements = new Map(tables.stages.map(({ stage, placements }) => [stage, placements]));

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
  return { name: text, bytes_per_parameter: table, sent: table.parameters };
}

function question(asked: Asked): planner.Question {
  const recipes = tables.recipes as unknown as planner.Recipe[];
  const named = recipes.find(({ name }) => name === (asked.preset ?? 'paper')) as planner.Recipe;
  const found = asked.bytes ? custom(asked.bytes) : named;
  const optimizers = tables.optimizers as Record<string, Record<string, number>>;
  return {
    parameters: Number(asked.params),
    ranks: asked.ranks ?? 1,
    recipe: asked.optimizer ? planner.withOptimizer(found, asked.optimizer, optimizers[asked.optimizer]) : found,
    accumulate: asked.accumulate,
    noSync: asked.no_sync,
    instances: asked.instances,
  };
}

/** A state of no bytes may be listed or not. */
const held = (states: Record<string, number>) => Object.fromEntries(Object.entries(states).filter(([, n]) => n > 0));

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
          traffic: found.traffic,
        }).toEqual({
          formula: expected.bytes_per_parameter,
          states: held(expected.states),
          total: expected.total,
          traffic,
        });
        expect(held(found.tiers.device)).toEqual(held(expected.states));
        if (asked.gpu_mem) {
          const limit = budget(asked.gpu_mem);
          expect(found.total <= limit).toBe(expected.fits);
          expect(planner.largest(found.sharing, place, asks.recipe, limit)).toBe(expected.largest);
        }
      }
      if (asked.instances) {
        const found = planner.instances(asks.parameters, asks.ranks, asked.instances, asks.recipe);
        // Python rounds each fraction once; products of doubles round twice.
        for (const [key, value] of Object.entries(plan.instances as Record<string, number>))
          expect(found[key as keyof typeof found], key).toBeCloseTo(value, value > 1 ? -Math.log10(value * 1e-14) : 13);
      }
    },
  );
});

describe('tiers', () => {
  const asks = question({ params: 7e9 + 1, ranks: 8 });
  const place = placements.get(3) as planner.Placements;

  test('move bytes and keep their sum', () => {
    const offload: planner.Offload = { parameters: 'device', gradients: 'host', optimizer: 'nvme' };
    const here = planner.plan(asks, 3, place);
    const moved = planner.plan({ ...asks, offload }, 3, place);
    expect(moved.states).toEqual(here.states);
    expect(Object.keys(moved.tiers.device)).toEqual(['parameters', 'padding']);
    expect(Object.keys(moved.tiers.host)).toEqual(['gradients', 'padding']);
    expect(Object.keys(moved.tiers.nvme)).toEqual(['master', 'm', 'v', 'padding']);
  });

  test('a device that holds nothing fits any model', () => {
    const offload: planner.Offload = { parameters: 'nvme', gradients: 'nvme', optimizer: 'nvme' };
    expect(planner.largest(8, place, asks.recipe, 2 ** 30, offload)).toBe(Number.POSITIVE_INFINITY);
  });
});
