import { expect, test } from 'vitest';
import * as format from '../src/lib/format';

test.each([
  ['7e9', 7e9],
  ['7B', 7e9],
  ['1.34 b', 1.34e9],
  ['6,738,415,616', 6_738_415_616],
  ['260', 260],
])('%s is a number of parameters', (text, value) => {
  expect(format.parseCount(text)).toBe(value);
});

test.each(['', '0', '-1', '1.5', '7e9B', 'seven', '1e400', '7 G B'])('%s is none', (text) => {
  expect(format.parseCount(text)).toBeNaN();
});

test('bytes are exact, in powers of 1000 and of 1024', () => {
  expect(format.bytes(1)).toBe('1 byte');
  expect(format.bytes(26_250_000_000)).toBe('26,250,000,000 bytes');
  expect(format.gb(26_250_000_000)).toBe('26.25 GB');
  expect(format.gib(26_250_000_000)).toBe('24.45 GiB');
  expect(format.size(2340)).toBe('2,340 bytes');
});

test.each([
  [4e-7, '0.0000004'],
  [0.000012345678, '0.00001235'],
  [-0.000999949, '−0.0009999'.replace('−', '-')],
  [0.0075625, '0.007563'],
  [2.099609375, '2.099609'],
  [1342382080, '1,342,382,080'],
  [0, '0'],
])('a number that is compared keeps four significant digits: %s', (value, text) => {
  expect(format.exact(value)).toBe(text);
});

test('a value is shown with the digits the document has', () => {
  expect(format.float(0.12)).toBe('0.12');
  expect(format.float(2.099609375)).toBe('2.099609375');
  expect(format.float(-5.5)).toBe('−5.5');
  expect(format.float(-4e-7)).toBe('−4e−7');
  expect(format.float('nan')).toBe('nan');
  expect(format.float(null)).toBe('–');
});
