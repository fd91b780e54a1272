/** Plays through beats: each takes a moment in which things fly, then the next one comes. */

/** Milliseconds of one beat at speed 1. */
const BEAT = 1100;
/** The part of a beat in which things fly; in the rest they are there. */
const FLIGHT = 0.75;
export const SPEEDS = [0.5, 1, 2, 4] as const;

const still = matchMedia('(prefers-reduced-motion: reduce)');

export class Player {
  playing = $state(false);
  speed = $state<number>(1);
  /** How far what flies in this beat has come, from 0 to 1. */
  progress = $state(1);
  #at: () => number;
  #last: () => number;
  #go: (at: number) => void;
  #frame = 0;
  #begun = 0;
  #begins = true;
  #pace: number;

  /** pace: milliseconds of one beat at speed 1. */
  constructor(at: () => number, last: () => number, go: (at: number) => void, pace = BEAT) {
    this.#pace = pace;
    this.#at = at;
    this.#last = last;
    this.#go = go;
    $effect(() => () => cancelAnimationFrame(this.#frame));
  }

  /** Goes to a beat. The next one is animated; a jump is not. */
  step(to: number): void {
    const next = Math.min(Math.max(to, 0), this.#last());
    if (next === this.#at() + 1) this.#begin();
    else {
      cancelAnimationFrame(this.#frame);
      this.progress = 1;
      if (this.playing) this.#begin();
    }
    this.#go(next);
  }

  toggle(): void {
    this.playing = !this.playing;
    if (!this.playing) return;
    if (this.#at() >= this.#last()) this.#go(0);
    this.#begin();
  }

  /** Stops, with what flew where it belongs. */
  still(): void {
    cancelAnimationFrame(this.#frame);
    this.playing = false;
    this.progress = 1;
  }

  pause(): void {
    this.playing = false;
  }

  #begin(): void {
    cancelAnimationFrame(this.#frame);
    this.#begins = true;
    this.progress = still.matches ? 1 : 0;
    this.#frame = requestAnimationFrame((now) => this.#tick(now));
  }

  #tick(now: number): void {
    if (this.#begins) this.#begun = now;
    this.#begins = false;
    const part = ((now - this.#begun) * this.speed) / this.#pace;
    this.progress = still.matches ? 1 : Math.min(part / FLIGHT, 1);
    if (part < 1 && (this.playing || this.progress < 1))
      this.#frame = requestAnimationFrame((next) => this.#tick(next));
    else if (this.playing)
      if (this.#at() < this.#last()) this.step(this.#at() + 1);
      else this.playing = false;
  }
}

/** Slow at both ends. */
export const eased = (part: number): number => part * part * (3 - 2 * part);
