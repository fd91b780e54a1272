import { expect, test } from 'vitest';
import { ORDER, paint } from '../src/lib/states';

test('what a run can hold at once is told apart by colour or hatch', () => {
  const at_once = [
    'parameters',
    'gradients',
    'master',
    'exp_avg',
    'exp_avg_sq',
    'step',
    'norms',
    'gather',
    'prefetch',
    'reduce',
    'staging',
    'lent',
  ];
  expect(at_once.every((state) => ORDER.includes(state))).toBe(true);
  expect(new Set(at_once.map(paint)).size).toBe(at_once.length);
});
