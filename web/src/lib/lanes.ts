/** For intervals in any order the row of each, so that those of a row do not overlap: the first row that is free. */
export function rows(intervals: readonly (readonly [start: number, end: number])[]): number[] {
  const found = new Array<number>(intervals.length).fill(0);
  const ends: number[] = [];
  const order = [...intervals.keys()].sort((a, b) => intervals[a][0] - intervals[b][0]);
  for (const index of order) {
    const [start, end] = intervals[index];
    const free = ends.findIndex((each) => each <= start);
    found[index] = free < 0 ? ends.length : free;
    ends[found[index]] = end;
  }
  return found;
}
