/** Which ranks share what among themselves, in words. */
import type { Group, Run } from './data';
import { integer } from './format';

/** `ranks 0, 2`, or of many the first two and the last. */
export function named(ranks: readonly number[]): string {
  if (ranks.length === 1) return `rank ${ranks[0]}`;
  return `ranks ${ranks.length > 4 ? `${ranks[0]}, ${ranks[1]}, … ${ranks[ranks.length - 1]}` : ranks.join(', ')}`;
}

/** What the ranks of a team shard among themselves. */
function sharded({ placements }: Pick<Run, 'placements'>, spread: boolean): string {
  const found = Object.entries(placements)
    .filter(([state, cut]) => cut && !(spread && state === 'optimizer'))
    .map(([state]) => (state === 'optimizer' ? 'optimizer states' : state));
  if (!found.length) return `Each rank has all parameters and gradients${spread ? '' : ', and all optimizer states'}.`;
  const last = found[found.length - 1];
  return `The ranks of a team shard ${found.length > 1 ? `${found.slice(0, -1).join(', ')} and ${last}` : last}.`;
}

/** What a group is of, and what its teams are to each other. */
export function says(run: Pick<Run, 'placements' | 'groups'>, group: Group): string {
  const { axis, buckets, numel, teams, rows, spread } = group;
  const what = rows ? 'Rows of tensors' : run.groups.length > 1 ? 'All other parameters' : 'All parameters';
  const said = [
    `${what}: ${integer(numel)} elements in ${integer(buckets)} ${buckets === 1 ? 'bucket' : 'buckets'}.`,
    sharded(run, spread),
  ];
  if (rows)
    said.push(
      `Ranks that differ along “${axis}” alone have the same rows, and every team has others.`,
      'Gathers and reductions stay inside a team.',
    );
  else if (teams.length > 1)
    said.push(
      `Each team is a replica of the model: ${named(teams.map(([rank]) => rank))} have the same, and so on.`,
      'Gathers and reductions stay inside a team; running sums of gradients go from one to the next.',
    );
  if (spread)
    said.push(
      'Of masters and optimizer states there is one copy: of each shard every replica updates a part, and sends it to the others.',
    );
  return said.join(' ');
}
