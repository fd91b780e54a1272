import { scaleLinear } from 'd3-scale';

/** Names of units with what one of them is, the largest first. */
export type Units = readonly (readonly [name: string, one: number])[];

export const TIME: Units = [
  ['s', 1e9],
  ['ms', 1e6],
  ['µs', 1e3],
  ['ns', 1],
];
export const BYTES: Units = [
  ['PB', 1e15],
  ['TB', 1e12],
  ['GB', 1e9],
  ['MB', 1e6],
  ['kB', 1e3],
  ['bytes', 1],
];

export interface Tick {
  value: number;
  text: string;
}

/** About so many round values between two, with as many digits as tell them apart, in the unit of the larger one. */
export function ticks(from: number, to: number, wanted: number, units: Units): Tick[] {
  const most = Math.max(Math.abs(from), Math.abs(to));
  const [name, one] = units.find((unit) => most >= unit[1]) ?? units[units.length - 1];
  const scale = scaleLinear([from / one, to / one], [0, 1]);
  const text = scale.tickFormat(wanted);
  return scale
    .ticks(wanted)
    .filter((value) => one > 1 || Number.isInteger(value)) // half a byte or tick is none
    .map((value) => ({ value: value * one, text: value ? `${text(value)} ${name}`.trim() : '0' }));
}
