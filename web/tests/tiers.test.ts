import { readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import type { Page, Run } from '../src/lib/data';
import { bounds } from '../src/lib/layout';
import { beatsOf, counters, crossed, hasAt } from '../src/lib/play';

const page: Page = JSON.parse(
  readFileSync(new URL('../../src/zeroshard/explain/walkthroughs.json', import.meta.url), 'utf8'),
);
const told = Object.fromEntries((page.walkthroughs?.runs ?? []).map(({ name, run }) => [name, run]));
const { offload, infinity, fp8 } = told;
const RANKS = [0, 1];
const played = (run: Run) => beatsOf(run.recording as NonNullable<Run['recording']>, run.layout);
/** Bytes that a rank moved in all beats, `device host gradients` and so on. */
function moved(run: Run, rank: number): Record<string, number> {
  const found: Record<string, number> = {};
  const all = crossed(played(run), rank, run.recording as NonNullable<Run['recording']>, run.layout);
  for (const { from, to, state, nbytes } of all)
    found[`${from} ${to} ${state}`] = (found[`${from} ${to} ${state}`] ?? 0) + nbytes;
  return found;
}
const optimizer = (held: Record<string, number>) => held.master + held.exp_avg + held.exp_avg_sq;

describe.each(RANKS)('rank %d', (rank) => {
  test('Offload: the sums go down, the new parameters come up, and nothing else moves', () => {
    const { host, device } = offload.summary[rank].tiers;
    expect(moved(offload, rank)).toEqual({
      'device host gradients': host.gradients,
      'host device optimizer': device.parameters / 2, // its half of what every rank has at stage 2
    });
  });

  test('Infinity: every state is read and written once in the step, and weights come up for each use', () => {
    const { host, nvme } = infinity.summary[rank].tiers;
    const found = moved(infinity, rank);
    expect(found['nvme host optimizer']).toBe(optimizer(nvme));
    expect(found['host nvme optimizer']).toBe(optimizer(nvme));
    expect(found['host nvme parameters']).toBe(nvme.parameters);
    expect(found['device host gradients']).toBe(host.gradients);
    // Backward gathers all modules but the first, and finds the last three in the buffers of files.
    const [first, second, ...last] = infinity.layout.buckets.map(({ share = 0 }) => 2 * share);
    expect(last.length).toBe(3);
    expect(found['nvme host parameters']).toBe(nvme.parameters + second);
    expect(found['host device parameters']).toBe(2 * nvme.parameters - first);
    expect(Object.keys(found).length).toBe(6);
  });

  test('8 bits: nothing leaves the device', () => {
    expect(moved(fp8, rank)).toEqual({});
    expect(Object.keys(fp8.summary[rank].tiers)).toEqual(['device']);
  });

  test.each([
    ['offload', offload],
    ['infinity', infinity],
    ['fp8', fp8],
  ])('%s: what moves between tiers is no message', (_, run) => {
    const beats = played(run);
    const { sent, received } = counters(beats, beats.length - 1);
    const lines = run.traffic.filter(({ verb }) => verb !== 'control');
    if (rank === 0) expect(sent[0]).toBe(lines.reduce((sum, line) => sum + line.sent, 0));
    if (rank === 0) expect(sent[0] + received[0]).toBe(lines.reduce((sum, line) => sum + line.sent_and_received, 0));
    expect(sent[rank]).toBe(received[rank]);
  });

  test.each([
    ['offload', offload],
    ['infinity', infinity],
    ['fp8', fp8],
  ])('%s: at the end all that the rank owns is new, in the tier where it rests', (_, run) => {
    const beats = played(run);
    const has = hasAt(beats, beats.length - 1, run.layout, run.placements, rank);
    const before = hasAt(beats, 0, run.layout, run.placements, rank);
    const own = run.layout.buckets.flatMap((bucket, index) => {
      const base = run.layout.buckets.slice(0, index).reduce((sum, { numel }) => sum + numel, 0);
      return [bounds(bucket, rank).map((at) => base + at)];
    });
    const tier = (state: 'parameters' | 'optimizer') => run.layout.buckets[0].rests?.[state];
    for (const state of ['parameters', 'optimizer'] as const) {
      if (state === 'parameters' && !run.placements.parameters) continue;
      for (const [start, stop] of own) {
        const now = has[state].filter((each) => each[0] <= start && stop <= each[1]);
        expect(now.map((each) => [each[2], each[3]])).toEqual([['new', tier(state)]]);
        const then = before[state].filter((each) => each[0] <= start && stop <= each[1]);
        expect(then.map((each) => [each[2], each[3]])).toEqual([['old', tier(state)]]);
      }
    }
  });
});

test('Offload: a new parameter is old until it has come up, and its master is new at once', () => {
  const beats = played(offload);
  const adam = beats.findIndex(({ kind }) => kind === 'adam');
  const of = (at: number) => hasAt(beats, at, offload.layout, offload.placements, 0);
  expect(of(adam).parameters).toEqual([[0, 260, 'old']]);
  expect(new Set(of(adam).optimizer.map(([, , age, tier]) => `${age} ${tier}`))).toEqual(new Set(['new host']));
  expect(beats[adam + 1].key).toBe('tier:up:1');
  expect(of(adam + 1).parameters[0]).toEqual([0, 4, 'new']);
});

test('Infinity: a module is updated after its states were read, while those of the next are there already', () => {
  const step = played(infinity).filter(({ chapter }) => chapter === 'stepped');
  expect(step.map(({ verb, unit }) => `${verb} ${unit}`)).toEqual(
    ['in 1', 'in 2', 'update 1', 'out 1', 'in 3', 'update 2', 'out 2', 'in 4', 'update 3', 'out 3'].concat([
      'in 5',
      'update 4',
      'out 4',
      'update 5',
      'out 5',
    ]),
  );
  expect(step.some(({ kind }) => kind === 'adam')).toBe(false);
  const beats = played(infinity);
  const of = (key: string) => {
    const has = hasAt(
      beats,
      beats.findIndex((each) => each.key === key),
      infinity.layout,
      infinity.placements,
      0,
    );
    return [has.parameters[0], has.gradients[0], has.optimizer[0]];
  };
  const [sum, average] = ['sum', 'average'].map((what) => [0, 4, what, 'host']);
  const [old, made] = ['old', 'new'].map((age) => [0, 4, age, 'nvme']);
  expect(of('tier:in:1')).toEqual([old, sum, old]);
  expect(of('tier:update:1')).toEqual([old, average, old]);
  expect(of('tier:out:1')).toEqual([made, average, made]);
});

test('8 bits: a matrix takes a byte in a message, and is rounded anew after Adam', () => {
  const beats = played(fp8);
  const cast = beats.filter(({ verb }) => verb === 'cast').flatMap(({ buckets }) => buckets);
  expect(cast).toEqual(fp8.layout.buckets.flatMap(({ computes }, bucket) => (computes ? [bucket] : [])));
  expect(beats.findIndex(({ kind }) => kind === 'adam')).toBeLessThan(beats.findIndex(({ verb }) => verb === 'cast'));
  for (const { kind, buckets, moves } of beats)
    if (kind === 'gather')
      for (const move of moves[0]) {
        const { numel, itemsize, computes } = fp8.layout.buckets[move[2]];
        expect(buckets).toContain(move[2]);
        expect(move[4]).toBe(numel * (computes ? 1 : 2));
        expect(itemsize).toBe(computes ? 1 : 2);
      }
});
