import { readFileSync } from 'node:fs';
import { describe, expect, test } from 'vitest';
import type { Page } from '../src/lib/data';
import { bits, document, KINDS, lines, shares, total } from '../src/lib/faults';

const page: Page = JSON.parse(
  readFileSync(new URL('../../src/zeroshard/explain/walkthroughs.json', import.meta.url), 'utf8'),
);
const faults = page.walkthroughs?.faults;
if (!faults) throw new Error('no walkthroughs');
const told = faults.stories.map((story) => ({ ...story, of: `${story.kind} ${story.name}` }));

test('each button has stories', () => {
  for (const [kind] of KINDS) expect(told.filter((each) => each.kind === kind).length).toBeGreaterThan(1);
  expect(new Set(told.map(({ kind }) => kind))).toEqual(new Set(KINDS.map(([kind]) => kind)));
});

describe.each(told)('$of', (story) => {
  test('at its end every loss is that of the run that was never stopped', () => {
    const [whole, before, after] = lines(faults, story, story.beats[story.beats.length - 1]);
    expect(whole.cells.map((cell) => cell?.losses)).toEqual(faults.losses);
    const shown = [...before.cells, ...after.cells].filter((cell) => cell !== null);
    expect(shown.every(({ same }) => same)).toBe(true);
    expect(after.cells[faults.steps - 1]).not.toBeNull();
    expect(shown.length).toBe(story.lines[0].losses.length + story.lines[1].losses.length);
  });

  test('a loss of other bits would be told', () => {
    const other = structuredClone(faults);
    other.losses[faults.steps - 1][0] += 2 ** -20;
    const found = lines(other, story, story.beats[story.beats.length - 1]);
    expect(found[2].cells.map((cell) => cell?.same).filter((same) => same === false).length).toBe(1);
  });

  test('before the fault nothing goes on', () => {
    const [, before, after] = lines(faults, story, story.beats[0]);
    expect(before.cells.filter((cell) => cell !== null).length).toBe(story.beats[0].shown[0]);
    expect(after.cells.every((cell) => cell === null)).toBe(true);
  });

  test('a flip is one bit', () => {
    for (const { flip } of story.beats)
      if (flip) {
        const [before, after] = flip.bytes.map(bits);
        expect(before.map((bit, at) => bit !== after[at])).toEqual(bits(1 << flip.bit).map((bit) => bit === '1'));
      }
  });

  test('what a rank reads of the files is what it reads of the states', () => {
    for (const { reads } of story.beats)
      for (const { files, states } of reads ?? []) {
        const read = Object.values(files).flatMap((spans) => spans.map(([start, stop]) => stop - start));
        expect(read.reduce((sum, n) => sum + n, 0)).toBe(total(states));
      }
  });
});

test('intervals are shares of the file', () => {
  expect(shares([[0, 25], [50, 100]], 100)).toEqual([{ left: 0, width: 25 }, { left: 50, width: 50 }]); // biome-ignore format: pairs
});

test('the documents are linked where the page knows them, and by addresses alone', () => {
  expect(document('./', 'a.html')).toBe('./a.html');
  expect(document('https://example.org/docs', 'a.html')).toBe('https://example.org/docs/a.html');
  expect(document('javascript:alert(1)//', 'a.html')).toBeNull();
  expect(document(undefined, 'a.html')).toBeNull();
});
