/** The transformer of 260 parameters as a drawing: its blocks, what flows through them, and where each is drawn. */
import type { Matrix, Transformer, Values } from './data';

type Made = Exclude<keyof Values['forward'][number], 'loss'>;

export interface Block {
  key: string;
  /** What is computed, in short. */
  name: string;
  says: string;
  /** The unit whose weights it uses; empty where it uses none. */
  unit: string;
  tensors: string[];
  makes: Made[];
  /** Column, and row from -1 (top) to 1. */
  at: [column: number, row: number];
}

export const BLOCKS: Block[] = [
  {
    key: 'x',
    name: 'x',
    says: 'The input: a row for each token, already embedded.',
    unit: '',
    tensors: [],
    makes: [],
    at: [0, 0],
  },
  {
    key: 'ln1',
    name: 'norm',
    says: 'Layer norm: each row minus its mean μ, divided by its deviation σ, times γ, plus β.',
    unit: 'norm1',
    tensors: ['gamma1', 'beta1'],
    makes: ['mu', 'sigma', 'x1'],
    at: [1, 0],
  },
  {
    key: 'q',
    name: 'Q',
    says: 'Queries: x₁ times W_q.',
    unit: 'attention',
    tensors: ['W_q'],
    makes: ['q'],
    at: [2, -1],
  },
  { key: 'k', name: 'K', says: 'Keys: x₁ times W_k.', unit: 'attention', tensors: ['W_k'], makes: ['k'], at: [2, 0] },
  { key: 'v', name: 'V', says: 'Values: x₁ times W_v.', unit: 'attention', tensors: ['W_v'], makes: ['v'], at: [2, 1] },
  {
    key: 'scores',
    name: 'scores',
    says: 'For each of two attention heads, its two columns of Q times those of K, divided by √2: a row for each token, a column for each token it looks at.',
    unit: 'attention',
    tensors: [],
    makes: ['scores'],
    at: [3, -0.5],
  },
  {
    key: 'softmax',
    name: 'softmax',
    says: 'Each row of scores becomes positive and adds up to 1.',
    unit: 'attention',
    tensors: [],
    makes: ['weights'],
    at: [4, -0.5],
  },
  {
    key: 'heads',
    name: 'mix V',
    says: 'Each attention head mixes its two columns of V by its softmax. Both results stand side by side.',
    unit: 'attention',
    tensors: [],
    makes: ['mixed'],
    at: [5, 0],
  },
  {
    key: 'wo',
    name: 'W_o',
    says: 'Both heads’ results times W_o.',
    unit: 'attention',
    tensors: ['W_o'],
    makes: ['attended'],
    at: [6, 0],
  },
  {
    key: 'add1',
    name: '+',
    says: 'The residual: the input x is added.',
    unit: '',
    tensors: [],
    makes: ['middle'],
    at: [7, 0],
  },
  {
    key: 'ln2',
    name: 'norm',
    says: 'The second layer norm.',
    unit: 'norm2',
    tensors: ['gamma2', 'beta2'],
    makes: ['x2'],
    at: [8, 0],
  },
  {
    key: 'hidden',
    name: 'W₁ ReLU',
    says: 'Times W₁, plus b₁; what is negative becomes 0.',
    unit: 'feed_forward',
    tensors: ['W1', 'b1'],
    makes: ['hidden'],
    at: [9, 0],
  },
  {
    key: 'ffn',
    name: 'W₂',
    says: 'Times W₂, plus b₂.',
    unit: 'feed_forward',
    tensors: ['W2', 'b2'],
    makes: ['fed'],
    at: [10, 0],
  },
  { key: 'add2', name: '+', says: 'The second residual.', unit: '', tensors: [], makes: ['last'], at: [11, 0] },
  {
    key: 'logits',
    name: 'logits',
    says: 'Times W_vocab: a number for each of the eight words.',
    unit: 'head',
    tensors: ['W_vocab'],
    makes: ['logits'],
    at: [12, 0],
  },
  {
    key: 'probabilities',
    name: 'softmax',
    says: 'The logits as probabilities of the next word.',
    unit: '',
    tensors: [],
    makes: ['probabilities'],
    at: [13, 0],
  },
  {
    key: 'loss',
    name: 'loss',
    says: 'The mean of −log(probability) of the target words.',
    unit: '',
    tensors: [],
    makes: [],
    at: [14, 0],
  },
];

/** From block to block. Those that pass others by have a way of their own, above or below. */
export const EDGES: [from: string, to: string, way?: 'above' | 'below'][] = [
  ['x', 'ln1'],
  ['x', 'add1', 'above'],
  ['ln1', 'q'],
  ['ln1', 'k'],
  ['ln1', 'v'],
  ['q', 'scores'],
  ['k', 'scores'],
  ['scores', 'softmax'],
  ['softmax', 'heads'],
  ['v', 'heads', 'below'],
  ['heads', 'wo'],
  ['wo', 'add1'],
  ['add1', 'ln2'],
  ['add1', 'add2', 'above'],
  ['ln2', 'hidden'],
  ['hidden', 'ffn'],
  ['ffn', 'add2'],
  ['add2', 'logits'],
  ['logits', 'probabilities'],
  ['probabilities', 'loss'],
];

export const COLUMNS = BLOCKS.length - 2; // Q, K and V share one

export const TITLES: Record<Made, string> = {
  mu: 'μ',
  sigma: 'σ',
  x1: 'x₁, after norm1',
  q: 'Q',
  k: 'K',
  v: 'V',
  scores: 'scores',
  weights: 'softmax of the scores',
  mixed: 'mixed V, side by side',
  attended: 'times W_o',
  middle: 'x + attention',
  x2: 'x₂, after norm2',
  hidden: 'hidden, after ReLU',
  fed: 'feed_forward',
  last: 'x + attention + feed_forward',
  logits: 'logits',
  probabilities: 'probabilities',
};

/** What comes out of a block: the rows and columns of its last matrix, or nothing for the loss. */
export function dims(block: Block, data: Transformer): string {
  const made = block.makes.at(-1);
  if (block.key === 'loss') return '';
  return (made ? data.runs.bf16.forward[0][made] : data.batches[0].x).shape.join('×');
}

/** Matrices of a block on one rank. What has a part for each head is one matrix for each. */
export function values(block: Block, data: Transformer, run: Values, rank: number): (Matrix & { title: string })[] {
  const x = { title: `x`, ...data.batches[rank].x };
  if (block.key === 'x') return [x];
  return block.makes.flatMap((made) => {
    const { shape, values } = run.forward[rank][made];
    if (shape.length < 3) return [{ title: TITLES[made], shape, values }];
    const each = shape[1] * shape[2];
    return Array.from({ length: shape[0] }, (_, head) => ({
      title: `${TITLES[made]}, head ${head + 1}`,
      shape: shape.slice(1),
      values: values.slice(head * each, (head + 1) * each),
    }));
  });
}
