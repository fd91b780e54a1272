/** Ten stops on a way through the four stages, before free play. All numbers are the recorded runs'. */
import type { PlayedStage, Transformer } from './data';
import { integer } from './format';
import type { Question } from './questions';

export interface Stop {
  title: string;
  says: string;
  stage: number;
  ranks: number;
  /** The frame that it begins at. */
  key: string;
  /** At the end of a stage. */
  question?: Question;
}

const TRAVELS = ['gather', 'reduce', 'broadcast'];
/** Bytes that rank 0 sends in the step. */
const sent = ({ traffic }: PlayedStage): number =>
  traffic[0].filter(({ verb }) => TRAVELS.includes(verb)).reduce((sum, line) => sum + line.sent, 0);

/** A question with a number of bytes for an answer, among other numbers of the same runs. */
function guess(ask: string, right: number, others: number[], because: string): Question {
  const options = [...new Set([right, ...others])].sort((one, other) => one - other).map(integer);
  return { ask, options, answer: integer(right), because };
}

export function stops({ played }: Transformer): Stop[] {
  const of = (ranks: number) => {
    const found = played.find((each) => each.cut === 'layers' && each.ranks === ranks && each.step === 2);
    if (!found) throw new Error(`no step with each layer cut on ${ranks} ranks`);
    return found.stages;
  };
  const [two, eight] = [of(2), of(8)];
  const [zero, one, , three] = two.map(({ nbytes }) => nbytes);
  const gradients = two.map(({ held }) => held[0].gradients);
  const all = two.map(({ nbytes }) => nbytes);
  const sends = two.map(sent);
  const at = (stage: number, key: string, ranks = 2) => ({ stage, ranks, key });
  return [
    {
      title: 'Everything twice',
      says: `Stage 0 is plain data parallelism: each rank has all parameters, gradients, masters, m and v. That is ${integer(zero)} bytes on each rank, and 4 for each tensor’s step counter.`,
      ...at(0, 'start'),
    },
    {
      title: 'The gradients meet',
      says: 'Each rank has computed on its own data. The gradients of a module are sent as soon as backward has made them, and added up.',
      ...at(0, 'reduce:backward:5'),
    },
    {
      title: 'Both ranks do the same work',
      says: 'Each rank runs Adam for every parameter, with the same averages, and gets the same result.',
      ...at(0, 'adam:stepped:-1'),
      question: guess(
        'How many bytes do the two ranks hold together at stage 0?',
        2 * zero,
        [zero, zero / 2],
        `Each has all ${integer(zero)} bytes. The second copy is what ZeRO removes.`,
      ),
    },
    {
      title: 'Stage 1 cuts the optimizer state',
      says: 'Masters, m and v are cut inside each layer: rank 0 has the first half of every layer, rank 1 the second. No rank owns a layer.',
      ...at(1, 'start'),
    },
    {
      title: 'New parameters come back',
      says: 'Each rank has updated its half of each layer. The halves are exchanged, and both ranks have the whole new model.',
      ...at(1, 'return:gathered parameters:2'),
      question: guess(
        `A rank held ${integer(zero)} bytes at stage 0. How many at stage 1?`,
        one,
        all,
        `Of 16 bytes per parameter, 12 are the optimizer’s, and a rank keeps half of these.`,
      ),
    },
    {
      title: 'Stage 2 cuts the gradients',
      says: 'In backward each rank sends the gradients that it does not own to their owner, and does not keep them.',
      ...at(2, 'reduce:backward:4'),
    },
    {
      title: 'Only sums are left',
      says: 'After backward each rank has the sums of its own halves. It needs no others: Adam runs on these.',
      ...at(2, 'land:backward:-1'),
      question: guess(
        `At stage 1 a rank holds ${integer(gradients[1])} bytes of gradients at rest. How many at stage 2?`,
        gradients[2],
        [gradients[1], gradients[2] / 2],
        'It keeps the gradients of what it updates: half of each layer.',
      ),
    },
    {
      title: 'Stage 3 cuts the parameters',
      says: 'Attention is needed next, and no rank has all of it. Each sends its half to the other while the module before still computes.',
      ...at(3, 'gather:forward:2'),
    },
    {
      title: 'Used and released',
      says: 'When a module has computed, the half that came is released. In backward it is gathered once more.',
      ...at(3, 'release:forward:2'),
      question: guess(
        `A rank sends ${integer(sends[2])} bytes in a step of stage 2. How many at stage 3?`,
        sends[3],
        [sends[2], sends[2] * 2],
        'Parameters are gathered for forward and again for backward, but not the first module’s: its input needs no gradient. Gradients are reduced once.',
      ),
    },
    {
      title: 'More ranks, less on each',
      says: `Eight ranks at stage 3: ${integer(eight[3].nbytes)} bytes on each, where two have ${integer(three)}. Of two ranks each sends ${integer(sends[0])} bytes in a step of stage 0, 1 or 2, and ${integer(sends[3])} of stage 3. With sums in fp32, as zeroshard has them unless told otherwise, stage 0 sends as many as stage 3. Now play freely.`,
      ...at(3, 'start', 8),
    },
  ];
}
