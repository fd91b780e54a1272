/** Which rank owns which element, as the layout says. */
import type { Bucket, Layout, Slot } from './data';

export const numel = (shape: number[]): number => shape.reduce((a, b) => a * b, 1);

/** How many ranks share a bucket. */
export function size(bucket: Bucket): number {
  if (bucket.size) return bucket.size;
  if (bucket.bounds) return bucket.bounds.length - 1;
  const share = bucket.share ?? bucket.numel;
  return share ? Math.round(bucket.numel / share) : 1;
}

/** Where a rank sits in its team. With several replicas of the model ranks at the same position of each have the same. */
export const position = (bucket: Bucket, rank: number): number =>
  Math.floor(rank / (bucket.stride ?? 1)) % size(bucket);

/** The number of a rank's team: of its rows, or of its replica. */
export function team(bucket: Bucket, rank: number): number {
  const stride = bucket.stride ?? 1;
  return Math.floor(rank / (stride * size(bucket))) * stride + (rank % stride);
}

/** The shard of a rank. */
export function bounds(bucket: Bucket, rank: number): [start: number, stop: number] {
  const at = position(bucket, rank);
  if (bucket.bounds) return [bucket.bounds[at], bucket.bounds[at + 1]];
  const share = bucket.share ?? bucket.numel;
  return [at * share, (at + 1) * share];
}

/** What a rank updates of it: all of its shard, or its replica's part. */
export function updated(bucket: Bucket, rank: number): [start: number, stop: number] {
  if (!bucket.updates) return bounds(bucket, rank);
  const at = position(bucket, rank) * Math.round((bucket.updates.length - 1) / size(bucket)) + team(bucket, rank);
  return [bucket.updates[at], bucket.updates[at + 1]];
}

/** A tensor with the rows that all teams have of it. */
export const whole = (bucket: Bucket, [, shape]: Slot): number[] =>
  bucket.parts ? [(shape[0] ?? 1) * bucket.parts, ...shape.slice(1)] : shape;

/** The parts of a tensor that each rank (of one replica, the first) owns, in the tensor's own elements, all rows
 * counted; in their order. Ranks without a part are left out. */
export function fragments(layout: Layout, bucket: Bucket, slot: Slot): [rank: number, start: number, stop: number][] {
  const [, shape, first] = slot;
  const last = first + numel(shape);
  const found: [number, number, number][] = [];
  for (let rank = 0; rank < layout.ranks; rank += 1) {
    const [start, stop] = bounds(bucket, rank);
    const from = Math.max(start, first);
    const to = Math.min(stop, last);
    const before = bucket.parts ? team(bucket, rank) * numel(shape) : 0;
    if (from < to) found.push([rank, before + from - first, before + to - first]);
  }
  return found.sort((one, other) => one[1] - other[1]);
}
