/** Memory against time where several steps share one axis: the order of all their beats. */
import type { Recording } from './data';
import { snapshots } from './memory';
import type { Beat } from './play';

export type Point = [x: number, nbytes: number];

/** A time of one rank as a place on the axis: beats are where their keys are, and between them it goes evenly. */
export function warp(beats: readonly Beat[], order: readonly string[], rank: number): (time: number) => number {
  const places = beats.map(({ key }) => order.indexOf(key));
  return (time) => {
    const next = beats.findIndex(({ at }) => at[rank] > time);
    if (next === 0) return places[0];
    if (next < 0) return places[places.length - 1];
    const [from, to] = [beats[next - 1].at[rank], beats[next].at[rank]];
    return places[next - 1] + ((places[next] - places[next - 1]) * (time - from)) / (to - from);
  };
}

/** What a shown rank held on the device in all: the places at which that changes, and the bytes from there on. */
export function curve(recording: Recording, beats: readonly Beat[], order: readonly string[], rank: number): Point[] {
  const place = warp(beats, order, rank);
  const tier = Math.max(recording.tiers.indexOf('device'), 0);
  return snapshots(recording.ranks[rank], tier, recording.states.length).map(({ at, total }) => [place(at), total]);
}

/** The bytes at a place. */
export const valueAt = (points: readonly Point[], x: number): number =>
  points[
    Math.max(
      points.findLastIndex(([at]) => at <= x),
      0,
    )
  ][1];
