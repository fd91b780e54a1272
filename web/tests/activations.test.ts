import { expect, test } from 'vitest';
import { activations, MODELS } from '../src/lib/activations';

const shape = { layers: 96, hidden: 12288, heads: 96, sequence: 2048, samples: 1 };

test('a layer keeps s·b·h·(34 + 5·a·s/h) bytes', () => {
  const each = 2048 * 12288 * (34 + (5 * 96 * 2048) / 12288);
  expect(activations(shape, false)).toBe(96 * each);
  expect(activations({ ...shape, samples: 3 }, false)).toBe(3 * 96 * each);
  expect(activations(shape, true)).toBe(96 * 2 * 2048 * 12288 + each);
});

test('a model’s parameters are about 12 layers·hidden² and its embedding', () => {
  for (const { layers, hidden, parameters, title } of MODELS) {
    const blocks = 12 * layers * hidden ** 2;
    expect(parameters / blocks, title).toBeGreaterThan(1);
    expect(parameters / blocks, title).toBeLessThan(1.5);
  }
});
