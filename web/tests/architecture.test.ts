import { readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import { BLOCKS, COLUMNS, dims, EDGES, values } from '../src/lib/architecture';
import type { Page } from '../src/lib/data';

const page: Page = JSON.parse(
  readFileSync(new URL('../../src/zeroshard/explain/walkthroughs.json', import.meta.url), 'utf8'),
);
const data = page.walkthroughs?.transformer as NonNullable<Page['walkthroughs']>['transformer'];
const block = (key: string) => BLOCKS.find((each) => each.key === key) as (typeof BLOCKS)[number];

test('the drawing has every tensor and every recorded value once', () => {
  expect(BLOCKS.flatMap(({ tensors }) => tensors)).toEqual(data.tensors.map(({ symbol }) => symbol));
  const made = BLOCKS.flatMap(({ makes }) => makes);
  expect([...made, 'loss'].sort()).toEqual(Object.keys(data.runs.bf16.forward[0]).sort());
  expect(new Set(made).size).toBe(made.length);
});

test('a block is drawn in the unit that holds its tensors', () => {
  for (const { unit, tensors } of BLOCKS)
    for (const symbol of tensors)
      expect(data.tensors.find((each) => each.symbol === symbol)?.name.split('.')[0]).toBe(unit);
});

test('everything flows from x to the loss, and to the right', () => {
  for (const [from, to] of EDGES) expect(block(from).at[0]).toBeLessThan(block(to).at[0]);
  for (const { key } of BLOCKS) {
    expect(EDGES.some(([from]) => from === key)).toBe(key !== 'loss');
    expect(EDGES.some(([, to]) => to === key)).toBe(key !== 'x');
  }
  expect(Math.max(...BLOCKS.map(({ at }) => at[0])) + 1).toBe(COLUMNS);
});

test('dimensions are those of the run', () => {
  const shown = Object.fromEntries(BLOCKS.map((each) => [each.key, dims(each, data)]));
  expect(shown).toMatchObject({
    x: '3×4',
    q: '3×4',
    scores: '2×3×3',
    softmax: '2×3×3',
    heads: '3×4',
    hidden: '3×16',
    logits: '3×8',
    loss: '',
  });
});

test.each([0, 1])('rank %d: the values are what the operations make of each other', (rank) => {
  const run = data.runs.float64;
  const of = (key: string) => values(block(key), data, run, rank);
  const rows = ({ shape, values: all }: { shape: number[]; values: number[] }) =>
    Array.from({ length: shape[0] }, (_, row) => all.slice(row * shape[1], (row + 1) * shape[1]));
  const close = (found: number[], expected: number[]) =>
    expect(found.map((value, index) => Math.abs(value - expected[index])).every((each) => each < 1e-12)).toBe(true);
  const softmax = (row: number[]) => {
    const sum = row.reduce((all, each) => all + Math.exp(each), 0);
    return row.map((each) => Math.exp(each) / sum);
  };
  const [q, k, v] = ['q', 'k', 'v'].map((key) => rows(of(key)[0]));
  const [scores, weights] = [of('scores'), of('softmax')];
  expect([scores.length, weights.length]).toEqual([2, 2]);
  const mixed = rows(of('heads')[0]);
  for (const head of [0, 1]) {
    const part = (row: number[]) => row.slice(2 * head, 2 * head + 2);
    rows(scores[head]).forEach((row, token) => {
      close(
        row,
        k.map((key) => part(key).reduce((sum, each, at) => sum + each * part(q[token])[at], 0) / Math.SQRT2),
      );
      close(rows(weights[head])[token], softmax(row));
      close(
        part(mixed[token]),
        [0, 1].map((at) => rows(weights[head])[token].reduce((sum, each, from) => sum + each * part(v[from])[at], 0)),
      );
    });
  }
  close(of('probabilities')[0].values, rows(of('logits')[0]).flatMap(softmax));
  close(
    of('add1')[0].values,
    of('wo')[0].values.map((value, at) => value + data.batches[rank].x.values[at]),
  );
  close(
    of('add2')[0].values,
    of('ffn')[0].values.map((value, at) => value + of('add1')[0].values[at]),
  );
  const loss = rows(of('probabilities')[0]).reduce(
    (sum, row, token) => sum - Math.log(row[data.batches[rank].targets[token]]) / 3,
    0,
  );
  expect(loss).toBeCloseTo(run.forward[rank].loss, 12);
});
