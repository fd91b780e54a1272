/** What forward of a transformer keeps for backward, in 16 bits, by the published estimate for one layer:
 * s·b·h·(34 + 5·a·s/h) bytes ("Reducing Activation Recomputation in Large Transformer Models"), attention scores kept. */
export interface Shape {
  layers: number;
  hidden: number;
  heads: number;
  /** Tokens of one sample, and samples of one rank. */
  sequence: number;
  samples: number;
}

const layer = ({ hidden, heads, sequence, samples }: Shape): number =>
  sequence * samples * (34 * hidden + 5 * heads * sequence);

/** Bytes on each rank. `recompute`: only what goes into each layer is kept, and one layer at a time made again. */
export function activations(shape: Shape, recompute: boolean): number {
  const inputs = 2 * shape.sequence * shape.samples * shape.hidden;
  return recompute ? shape.layers * inputs + layer(shape) : shape.layers * layer(shape);
}

export interface Model extends Omit<Shape, 'sequence' | 'samples'> {
  title: string;
  parameters: number;
}

/** Published sizes. */
export const MODELS: Model[] = [
  { title: 'GPT-2, 124 M', parameters: 124_439_808, layers: 12, hidden: 768, heads: 12 },
  { title: 'GPT-2 XL, 1.56 B', parameters: 1_557_611_200, layers: 48, hidden: 1600, heads: 25 },
  { title: 'Llama 2, 6.74 B', parameters: 6_738_415_616, layers: 32, hidden: 4096, heads: 32 },
  { title: 'Llama 3, 8.03 B', parameters: 8_030_261_248, layers: 32, hidden: 4096, heads: 32 },
  { title: 'Llama 2, 13.0 B', parameters: 13_015_864_320, layers: 40, hidden: 5120, heads: 40 },
  { title: 'Llama 3, 70.6 B', parameters: 70_553_706_496, layers: 80, hidden: 8192, heads: 64 },
];
