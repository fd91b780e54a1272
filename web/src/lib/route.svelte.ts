/** What is shown, kept in the URL's hash so that a view can be shared: `#transformer?stage=2&phase=reduce`. */

type Params = Record<string, string>;

class Route {
  view = $state('');
  params = $state<Params>({});
  #left: Record<string, Params> = {}; // each view as it was left
  #waiting: ReturnType<typeof setTimeout> | undefined;

  constructor() {
    this.#read();
    addEventListener('hashchange', () => this.#read());
  }

  /** Shows another view, as it was left. */
  go(view: string): void {
    this.#write(false);
    this.#left[this.view] = this.params;
    this.view = view;
    this.params = this.#left[view] ?? {};
    this.#write(true);
  }

  set(changes: Record<string, string | number | boolean | null>): void {
    const params = { ...this.params };
    for (const [key, value] of Object.entries(changes)) {
      if (value === null || value === false) delete params[key];
      else params[key] = String(value);
    }
    this.params = params;
    clearTimeout(this.#waiting); // browsers refuse hundreds of addresses in a row, as dragging makes them
    this.#waiting = setTimeout(() => this.#write(false), 120);
  }

  /** One of `allowed`, the first if the hash says something else. */
  choice<T extends string>(key: string, allowed: readonly T[], fallback: T = allowed[0]): T {
    return (allowed as readonly string[]).includes(this.params[key]) ? (this.params[key] as T) : fallback;
  }

  /** A whole number between `low` and `high`. */
  whole(key: string, fallback: number, low: number, high: number): number {
    const value = Number(this.params[key] ?? Number.NaN);
    return Number.isInteger(value) ? Math.min(Math.max(value, low), high) : fallback;
  }

  flag(key: string): boolean {
    return key in this.params;
  }

  hash(view: string, params: Params = {}): string {
    const query = new URLSearchParams(params).toString();
    return `#${view}${query && `?${query}`}`;
  }

  #read(): void {
    clearTimeout(this.#waiting);
    const [view, query = ''] = location.hash.slice(1).split('?', 2);
    this.view = view;
    this.params = Object.fromEntries(new URLSearchParams(query));
  }

  #write(push: boolean): void {
    clearTimeout(this.#waiting);
    const hash = this.hash(this.view, this.params);
    try {
      history[push ? 'pushState' : 'replaceState'](null, '', hash);
    } catch {
      // A notebook shows the page in a frame that has no address of its own.
    }
  }
}

/** The step that texts A and D print: the first, of a model with one cut. They add a stage. */
export const OWN_STEP = { cut: 'model', step: '1' };

export const route = new Route();
