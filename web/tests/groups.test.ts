import { readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import type { Page, Run } from '../src/lib/data';
import { named, says } from '../src/lib/groups';
import { bounds, fragments, numel, updated, whole } from '../src/lib/layout';
import { beatsOf, flights, hasAt } from '../src/lib/play';

function of(name: string): Run {
  const { run }: Page = JSON.parse(readFileSync(new URL(`../fixtures/${name}.json`, import.meta.url), 'utf8'));
  if (!run) throw new Error('no run');
  return run;
}
const told = { experts: of('experts'), replicas: of('replicas') };
const RANKS = [0, 1, 2, 3];

describe('a run with experts', () => {
  const run = told.experts;
  const along = run.layout.buckets.filter(({ parts }) => parts);

  test('its teams, and what is said of them', () => {
    expect(run.groups.map(({ axis, teams }) => [axis, teams])).toEqual([
      ['', [[0, 1, 2, 3]]],
      [
        'edp',
        [
          [0, 2],
          [1, 3],
        ],
      ],
    ]);
    expect(says(run, run.groups[0])).toMatch(
      /^All other parameters: .*The ranks of a team shard .*optimizer states\.$/,
    );
    expect(says(run, run.groups[1])).toContain('differ along “edp” alone have the same rows');
  });

  test('ranks of one team have the same rows, and every row has owners', () => {
    expect(along.length).toBeGreaterThan(0);
    for (const bucket of along) {
      expect(bounds(bucket, 0)).toEqual(bounds(bucket, 1));
      expect(bounds(bucket, 0)).not.toEqual(bounds(bucket, 2));
    }
    for (const bucket of run.layout.buckets)
      for (const slot of run.layout.slots.slice(bucket.first, bucket.last)) {
        let next = 0;
        for (const [rank, start, stop] of fragments(run.layout, bucket, slot)) {
          expect(start).toBe(next);
          if (bucket.parts) expect(rank % 2).toBe(start < numel(slot[1]) ? 0 : 1);
          next = stop;
        }
        expect(next).toBe(numel(whole(bucket, slot)));
      }
  });
});

describe('a run of two replicas whose optimizer is over all', () => {
  const run = told.replicas;

  test('what is said', () => {
    const [group] = run.groups;
    expect([group.teams, group.spread]).toEqual([
      [
        [0, 1],
        [2, 3],
      ],
      true,
    ]);
    expect(says(run, group)).toContain('The ranks of a team shard parameters and gradients.');
    expect(says(run, group)).toContain('ranks 0, 2 have the same');
    expect(says(run, group)).toContain('there is one copy');
  });

  test('every element is updated by one rank, in its shard', () => {
    for (const bucket of run.layout.buckets) {
      const parts = RANKS.map((rank) => updated(bucket, rank));
      for (const rank of RANKS) {
        const [low, high] = bounds(bucket, rank);
        expect(low <= parts[rank][0] && parts[rank][1] <= high).toBe(true);
      }
      const ends = [...parts].sort((one, other) => one[0] - other[0] || one[1] - other[1]);
      expect(ends.flat().filter((_, at) => at % 2)).toEqual([...ends.slice(1).map(([start]) => start), bucket.numel]);
      expect(ends[0][0]).toBe(0);
    }
    const beats = beatsOf(run.recording as NonNullable<Run['recording']>, run.layout);
    const has = RANKS.map((rank) => hasAt(beats, beats.length - 1, run.layout, run.placements, rank));
    const sum = (of: readonly (readonly [number, number, ...unknown[]])[]) =>
      of.reduce((all, [start, stop]) => all + stop - start, 0);
    const total = run.layout.buckets.reduce((all, bucket) => all + bucket.numel, 0);
    expect(has.reduce((all, { optimizer }) => all + sum(optimizer), 0)).toBe(total);
  });
});

describe.each(Object.entries(told))('%s', (_, run) => {
  test('what flies is what was gathered and reduced, on every rank', () => {
    const recording = run.recording as NonNullable<Run['recording']>;
    expect(recording.ranks.map(({ rank }) => rank).sort()).toEqual(RANKS);
    const ranks = recording.ranks.map(({ rank }) => rank);
    let flown = 0;
    for (const beat of beatsOf(recording, run.layout)) {
      if (beat.kind === 'release') continue;
      const found = flights(beat, run.layout, ranks);
      flown += found.length;
      for (const shown of ranks.keys())
        expect(
          found.filter(({ from }) => from === shown).reduce((all, { start, stop }) => all + 4 * (stop - start), 0),
        ).toBe(beat.moves[shown].reduce((all, move) => all + move[5], 0));
    }
    expect(flown).toBeGreaterThan(0);
  });
});

test('ranks by name', () => {
  expect([named([3]), named([0, 2]), named([0, 8, 16, 24, 32])]).toEqual(['rank 3', 'ranks 0, 2', 'ranks 0, 8, … 32']);
});
