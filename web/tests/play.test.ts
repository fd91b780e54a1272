import { readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import type { Moment, Page } from '../src/lib/data';
import { bounds } from '../src/lib/layout';
import { changes, heldAt, mostWithin } from '../src/lib/memory';
import { arriving, beatsOf, caption, counters, flights, followed, hasAt, merged, parts } from '../src/lib/play';

const at = (path: string): Page => JSON.parse(readFileSync(new URL(path, import.meta.url), 'utf8'));
const walk = at('../../src/zeroshard/explain/walkthroughs.json').walkthroughs;
if (!walk) throw new Error('no walkthroughs');
const { transformer, four } = walk;
const RANKS = [0, 1];
const told = transformer.stages.map((stage) => ({
  ...stage,
  beats: beatsOf(stage.recording, transformer.layout, true),
}));
/** The texts' own step and all that play beside it, stage by stage. */
const played = [
  { cut: 'model', ranks: 2, step: 1, layout: transformer.layout, stages: transformer.stages },
  ...transformer.played,
].flatMap(({ cut, ranks, step, layout, stages }) =>
  stages.map((stage) => ({
    ...stage,
    name: `cut ${cut}, ${ranks} ranks, step ${step}, stage ${stage.stage}`,
    step,
    layout,
    own: Array.from({ length: ranks }, (_, rank) => rank),
    beats: beatsOf(stage.recording, layout, true),
  })),
);
const valued = played.flatMap((each) => {
  const moments = each.moments as Moment[];
  return 'ranks' in moments[0] ? [{ ...each, moments }] : [];
});

describe('the 260 parameters', () => {
  test('either cut plays on 2, 4 and 8 ranks, the first step on two', () => {
    const steps = transformer.played.map(({ cut, ranks, step }) => `${cut} ${ranks} ${step}`);
    expect(steps.sort()).toEqual(
      ['layers 2 1', ...['layers', 'model'].flatMap((cut) => [2, 4, 8].map((ranks) => `${cut} ${ranks} 2`))].sort(),
    );
    expect(valued.length).toBe(16);
  });

  test.each(played)('$name: its chapters are the recorded moments', ({ beats, moments }) => {
    expect(parts(beats).map(({ chapter }) => chapter)).toEqual(moments.map(({ key }) => key));
  });

  test.each(valued)('$name: at the end of a chapter every rank has what was recorded', (stage) => {
    parts(stage.beats).forEach(({ chapter, last }, number) => {
      const age = ['stepped', 'gathered parameters', 'rest'].includes(chapter) ? 'new' : 'old';
      for (const rank of RANKS) {
        const { parameters, gradients, optimizer } = stage.moments[number].ranks[rank];
        const has = stage.step > 1 ? age : 'made';
        const expected = { parameters, gradients, optimizer: optimizer.map((each) => [...each, has]) };
        expect(hasAt(stage.beats, last, stage.layout, stage.placements, rank)).toEqual(expected);
      }
    });
  });

  test.each(played)('$name: m and v are there from the second step on', ({ beats, layout, placements, own, step }) => {
    for (const rank of own) {
      const { optimizer } = hasAt(beats, 0, layout, placements, rank);
      const elements = optimizer.reduce((sum, [start, stop]) => sum + stop - start, 0);
      const all = layout.buckets.reduce((sum, { numel }) => sum + numel, 0);
      const shard = layout.buckets.reduce((sum, bucket) => {
        const [low, high] = bounds(bucket, rank);
        return sum + high - low;
      }, 0);
      expect(elements).toBe(step === 1 ? 0 : placements.optimizer ? shard : all);
    }
  });

  test.each(played)('$name: what flies is what was sent and received', (stage) => {
    for (const beat of stage.beats)
      for (const rank of stage.own) {
        const found = flights(beat, stage.layout, stage.own);
        const nbytes = (side: 'from' | 'to') =>
          found.filter((each) => each[side] === rank).reduce((sum, { start, stop }) => sum + 2 * (stop - start), 0);
        const moved = beat.kind === 'release' ? [] : beat.moves[rank];
        expect(nbytes('from')).toBe(moved.reduce((sum, move) => sum + move[5], 0));
        expect(nbytes('to')).toBe(moved.reduce((sum, move) => sum + move[6], 0));
      }
  });

  test.each(played)('$name: the counters end at the traffic of the step', (stage) => {
    const { sent, received } = counters(stage.beats, stage.beats.length - 1);
    stage.traffic.forEach((lines, rank) => {
      const travels = lines.filter(({ verb }) => verb !== 'control');
      expect(sent[rank]).toBe(travels.reduce((sum, line) => sum + line.sent, 0));
      expect(sent[rank] + received[rank]).toBe(travels.reduce((sum, line) => sum + line.sent_and_received, 0));
    });
  });

  test('with each layer cut, every rank sends a part of every module, and as much as any other', () => {
    for (const { cut, ranks, layout } of transformer.played)
      if (cut === 'layers') for (const { numel, share } of layout.buckets) expect(share).toBe(Math.ceil(numel / ranks));
    for (const stage of played.filter(({ name }) => name.startsWith('cut layers'))) {
      const gathers = stage.beats.filter(({ kind }) => kind === 'gather' || kind === 'return');
      expect(gathers.length > 0).toBe(stage.stage > 0);
      for (const beat of gathers) {
        const found = flights(beat, stage.layout, stage.own);
        const sizes = stage.own.map((rank) =>
          found.filter(({ from }) => from === rank).reduce((sum, { start, stop }) => sum + stop - start, 0),
        );
        expect(new Set(sizes).size).toBe(1);
        expect(sizes[0]).toBeGreaterThan(0);
      }
    }
  });

  test('stage 3 gathers, computes and releases unit after unit', () => {
    const { beats } = told[3];
    const forward = beats.filter(({ chapter }) => chapter === 'forward');
    expect(forward.map(({ kind, unit }) => [kind, unit])).toEqual(
      [1, 2, 3, 4, 5].flatMap((unit) => ['gather', 'compute', 'release'].map((kind) => [kind, unit])),
    );
    const attention = beats.findIndex(({ key }) => key === 'gather:forward:2');
    const has = (index: number) => hasAt(beats, index, transformer.layout, told[3].placements, 1).parameters;
    expect([-1, 0, 1, 2].map((after) => has(attention + after))).toEqual([
      [[130, 260, 'old']],
      [
        [8, 72, 'gathered'],
        [130, 260, 'old'],
      ],
      [
        [8, 72, 'gathered'],
        [130, 260, 'old'],
      ],
      [[130, 260, 'old']],
    ]);
  });

  test.each(told)('stage $stage: a sum arrives in the frame from which its owners have it', (stage) => {
    const { layout } = transformer;
    let first = 0;
    const buckets = layout.buckets.map(({ unit, numel, bounds = [] }) => {
      first += numel;
      return { unit, bounds: bounds.map((at) => first - numel + at) };
    });
    const summed = (at: number) =>
      buckets.filter(({ bounds }) =>
        RANKS.every((rank) => {
          const [low, high] = [bounds[rank], bounds[rank + 1]];
          const { gradients } = hasAt(stage.beats, at, layout, stage.placements, rank);
          return (
            low === high || gradients.some(([start, stop, what]) => start <= low && high <= stop && what === 'sum')
          );
        }),
      );
    let told = 0;
    stage.beats.forEach(({ chapter, kind }, at) => {
      if (chapter !== 'backward' || kind === 'land') return;
      const before = summed(at - 1).map(({ unit }) => unit);
      const expected = summed(at).flatMap(({ unit }) => (before.includes(unit) ? [] : [layout.units[unit]]));
      expect(arriving(stage.beats, at, layout, RANKS).sort()).toEqual(expected.sort());
      const words = caption(stage.beats, at, layout, stage.placements, RANKS);
      for (const unit of expected) expect(words).toMatch(new RegExp(`The sum of .*${unit}.* has arrived`));
      told += expected.length;
    });
    expect(told).toBeGreaterThan(0);
  });

  test.each(told)('stage $stage: what frames say was held reaches the peaks, and adds up', (stage) => {
    const { recording, beats, moments } = stage;
    parts(beats).forEach(({ first, last }, number) => {
      for (const rank of RANKS) {
        const found = Array.from({ length: last - first + 1 }, (_, index) => {
          const before = beats[Math.max(first + index - 1, 0)].at[rank];
          const now = beats[first + index].at[rank];
          const [old, held] = [heldAt(recording, rank, before), heldAt(recording, rank, now)];
          const total = (bytes: Record<string, number>) => Object.values(bytes).reduce((a, b) => a + b, 0);
          expect(changes(old, held).reduce((sum, [, nbytes]) => sum + nbytes, total(old))).toBe(total(held));
          return mostWithin(recording, rank, before, now);
        });
        expect(Math.max(...found)).toBe(moments[number].ranks[rank].peak?.total);
      }
    });
  });

  test('a unit computes after its gather and before its reduction, at every stage', () => {
    for (const { beats } of told)
      for (const unit of [1, 2, 3, 4, 5]) {
        const of = beats.filter((beat) => beat.unit === unit && beat.chapter === 'backward').map(({ kind }) => kind);
        expect(of.filter((kind) => kind !== 'release')).toEqual(
          of.includes('gather') ? ['gather', 'compute', 'reduce'] : ['compute', 'reduce'],
        );
      }
  });

  test('one order holds all stages, each in its own', () => {
    const order = merged(told.map(({ beats }) => beats));
    expect(new Set(order).size).toBe(order.length);
    for (const { beats } of told) {
      expect(order.filter((key) => beats.some((beat) => beat.key === key))).toEqual(beats.map(({ key }) => key));
      const places = followed(order, beats);
      expect([places[0], places.at(-1)]).toEqual([0, beats.length - 1]);
    }
  });
});

test('what backward needs is computed again before it', () => {
  const beats = beatsOf(four.stages[3].recording, four.layout, true).filter(({ chapter }) => chapter === 'backward');
  expect(beats.map(({ kind, verb, unit }) => `${verb || kind} ${unit}`)).toEqual([
    'gather 1',
    'recompute 1',
    'gather 2',
    'recompute 2',
    'backward 2',
    'reduce 2',
    'backward 1',
    'reduce 1',
    'land -1',
    'release 1',
    'release 2',
  ]);
});

test.each(four.stages)('four weights, stage $stage: every message is in a beat', (stage) => {
  const beats = beatsOf(stage.recording, four.layout, true);
  const { sent } = counters(beats, beats.length - 1);
  expect(sent).toEqual(
    stage.traffic.map((lines) =>
      lines.filter(({ verb }) => verb !== 'control').reduce((sum, line) => sum + line.sent, 0),
    ),
  );
});

test.each(['run', 'run-1000', 'hostile', 'tiers'])('%s: every message of the first rank is in a beat', (name) => {
  const { run } = at(`../fixtures/${name}.json`);
  if (!run?.recording) throw new Error('no recording');
  const beats = beatsOf(run.recording, run.layout);
  const { sent } = counters(beats, beats.length - 1);
  expect(sent[0]).toBe(run.traffic.filter(({ verb }) => verb !== 'control').reduce((sum, line) => sum + line.sent, 0));
  for (const beat of beats)
    for (let rank = 1; rank < sent.length; rank += 1) expect(beat.moves[rank].length).toBe(beat.moves[0].length);
  // Whoever owns a part sends it to each of the others, ring or not.
  const gather = beats.find(({ kind }) => kind === 'gather');
  if (!gather) throw new Error('nothing is gathered');
  const each = run.layout.buckets[gather.buckets[0]].itemsize;
  const ranks = run.recording.ranks.map(({ rank }) => rank);
  const from = flights(gather, run.layout, ranks).filter((flight) => flight.from === 0);
  expect(from.reduce((sum, { start, stop }) => sum + each * (stop - start), 0)).toBe(
    gather.moves[0].reduce((sum, move) => sum + move[5], 0),
  );
});
