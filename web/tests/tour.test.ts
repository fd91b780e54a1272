import { readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import type { Page } from '../src/lib/data';
import { beatsOf } from '../src/lib/play';
import { stops } from '../src/lib/tour';

const page: Page = JSON.parse(
  readFileSync(new URL('../../src/zeroshard/explain/walkthroughs.json', import.meta.url), 'utf8'),
);
const data = page.walkthroughs?.transformer;
if (!data) throw new Error('no walkthroughs');
const tour = stops(data);

test('there are ten stops, and a question at the end of each stage', () => {
  expect(tour.map(({ stage }) => stage)).toEqual([0, 0, 0, 1, 1, 2, 2, 3, 3, 3]);
  expect(tour.flatMap(({ stage, question }) => (question ? [[stage, question.answer]] : []))).toEqual([
    [0, '8,320'],
    [1, '2,600'],
    [2, '260'],
    [3, '772'],
  ]);
  for (const { question } of tour)
    if (question) {
      expect(question.options).toContain(question.answer);
      expect(question.options.length).toBeGreaterThan(2);
    }
});

test.each(tour)('$title: its frame is in the step that it shows', ({ stage, ranks, key }) => {
  const found = data.played.find((each) => each.cut === 'layers' && each.ranks === ranks && each.step === 2);
  const beats = found ? beatsOf(found.stages[stage].recording, found.layout, true) : [];
  expect(beats.map((beat) => beat.key)).toContain(key);
});
