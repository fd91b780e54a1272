/** Two runs beside each other: one sentence on their bits, and their curves on one axis. */
import type { Compared, Run } from './data';
import { count } from './format';
import { snapshots } from './memory';

export interface Difference {
  title: string;
  says: string;
}

export interface Line {
  name: string;
  points: [x: number, y: number][];
}

export function verdict({ equal, differs, compared, steps, weights }: Compared): Difference {
  const same = `${count(compared)} losses and gradient norms`;
  if (equal) return { title: 'The bits are equal', says: `${same}, and all weights.` };
  if (differs)
    return {
      title: 'The bits differ',
      says: `From step ${differs.step} on: the losses there are ${differs.losses[0]} and ${differs.losses[1]}.`,
    };
  if (weights.includes(null))
    return { title: 'The same so far', says: `${same} are equal. A run that has not ended has no weights.` };
  const which = weights[0] === weights[1] ? 'equal' : 'different';
  return {
    title: weights[0] === weights[1] ? 'The same so far' : 'The weights differ',
    says: `${same} are equal; the runs have ${count(steps[0])} and ${count(steps[1])} steps. Their weights are ${which}.`,
  };
}

/** What rank 0 held on its device; every step from 0 to 1. Only runs of which a step was recorded. */
export function memories(runs: readonly Run[], names: readonly string[]): Line[] {
  return runs.flatMap(({ recording }, index) => {
    const rank = recording?.ranks[0];
    if (!recording || !rank) return [];
    const [start, stop] = rank.span;
    const tier = Math.max(recording.tiers.indexOf('device'), 0);
    const points = snapshots(rank, tier, recording.states.length).map(({ at, total }): [number, number] => [
      Math.min(Math.max((at - start) / (stop - start), 0), 1),
      total,
    ]);
    return [{ name: names[index], points: [...points, [1, points[points.length - 1][1]]] }];
  });
}

/** The losses over the steps, where both runs have some. */
export function losses(runs: readonly Run[], names: readonly string[]): Line[] {
  return runs.flatMap(({ curves }, index) => {
    const [step, loss] = ['step', 'loss'].map((column) => curves?.columns.indexOf(column) ?? -1);
    if (!curves || step < 0 || loss < 0) return [];
    const points = curves.rows
      .map((row) => [row[step], row[loss]])
      .filter((row): row is [number, number] => row.every((value) => typeof value === 'number'));
    return points.length ? [{ name: names[index], points }] : [];
  });
}
