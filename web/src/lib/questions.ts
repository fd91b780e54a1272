/** One question at the end of each view, to be guessed before it is answered. Answers are the recorded numbers. */
import type { Walkthroughs } from './data';
import { integer } from './format';

export interface Question {
  ask: string;
  options: string[];
  answer: string;
  because: string;
}

export function questions(data: Walkthroughs): Record<string, Question> {
  const { transformer, four, layers, overview } = data;
  const [zero, , , three] = transformer.stages;
  const whole = Object.entries(overview.stages[2].placements).filter(([, cut]) => !cut);
  const kept = four.checkpointing.find(({ how }) => how === 'whole');
  const gathers = kept?.gathered.filter((unit) => unit === four.layout.units[1]).length ?? 0;
  const padded = layers.padded['4'];
  return {
    overview: {
      ask: 'At stage 2, what does every rank still hold in full?',
      options: ['parameters', 'gradients', 'optimizer state'],
      answer: whole.map(([state]) => state).join(' and '),
      because: 'Stage 1 cuts the optimizer state, stage 2 the gradients too. Only stage 3 cuts the parameters.',
    },
    transformer: {
      ask: `A rank holds ${integer(zero.nbytes)} bytes at stage 0. How many at stage 3, on ${transformer.ranks} ranks?`,
      options: transformer.stages.map(({ nbytes }) => integer(nbytes)),
      answer: integer(three.nbytes),
      because: `Everything is cut into ${transformer.ranks} parts, and each rank keeps one. While a unit computes, its weights are there too.`,
    },
    weights: {
      ask: 'Backward keeps nothing but the input. How often is layer 1 gathered in one step of stage 3?',
      options: ['1 time', '2 times', '3 times'],
      answer: `${gathers} time${gathers === 1 ? '' : 's'}`,
      because: `The ranks gather ${kept?.gathered.join(', ')}: once in forward, and again for each time backward needs a layer.`,
    },
    layers: {
      ask: `A buffer of ${integer(layers.numel)} parameters is cut for 4 ranks. How many elements does it have then?`,
      options: [layers.numel - 3, layers.numel, padded].map(integer),
      answer: integer(padded),
      because: 'All ranks have parts of one size, so the buffer is padded until the number of ranks divides it.',
    },
  };
}
