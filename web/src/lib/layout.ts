/** Which rank owns which element, as the layout says. */
import type { Bucket, Layout, Slot } from './data';

export const numel = (shape: number[]): number => shape.reduce((a, b) => a * b, 1);

/** The shard of a rank. With several replicas of the model ranks at the same position of each have the same. */
export function bounds(bucket: Bucket, rank: number): [start: number, stop: number] {
  if (bucket.bounds) {
    const position = rank % (bucket.bounds.length - 1);
    return [bucket.bounds[position], bucket.bounds[position + 1]];
  }
  const share = bucket.share ?? bucket.numel;
  const position = share ? rank % Math.round(bucket.numel / share) : 0;
  return [position * share, (position + 1) * share];
}

/** The parts of a tensor that each rank (of one replica, the first) owns, in the tensor's own elements; ranks without a part are left out. */
export function fragments(layout: Layout, bucket: Bucket, slot: Slot): [rank: number, start: number, stop: number][] {
  const [, shape, first] = slot;
  const last = first + numel(shape);
  const found: [number, number, number][] = [];
  for (let rank = 0; rank < layout.ranks; rank += 1) {
    const [start, stop] = bounds(bucket, rank);
    const from = Math.max(start, first);
    const to = Math.min(stop, last);
    if (from < to) found.push([rank, from - first, to - first]);
  }
  return found;
}
