import { expect, test } from 'vitest';
import { field } from '../src/lib/field';

const ranks = (text?: string) => field(text, 8, [1, 1 << 20], 'ranks');
const memory = (text?: string) => field(text, 80, [0.01, 100_000], 'GiB', false);

test('a field that nobody filled has its default', () => {
  expect(ranks()).toMatchObject({ text: '8', value: 8, wrong: '' });
});

test.each(['2.5', '-3', '0', '1048577', 'x', '0x10', '1e999', 'NaN'])('%s is no number of ranks, in words', (text) => {
  expect(ranks(text)).toMatchObject({
    text,
    value: 8,
    wrong: `“${text}” is not a whole number of ranks from 1 to 1,048,576.`,
  });
});

test('an empty field asks', () => {
  expect(ranks(' ').wrong).toBe('Write a whole number of ranks from 1 to 1,048,576.');
});

test.each([
  ['8', 8],
  [' 64 ', 64],
  ['1e3', 1000],
])('%s is a number of ranks', (text, value) => {
  expect(ranks(text)).toMatchObject({ text, value, wrong: '' });
});

test('memory has decimals', () => {
  expect(memory('23.5')).toMatchObject({ value: 23.5, wrong: '' });
  expect(memory('0').wrong).toBe('“0” is not a number of GiB from 0.01 to 100,000.');
});
