import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { deflateSync } from 'fflate';
import type { Plugin } from 'vite';
import { viteSingleFile } from 'vite-plugin-singlefile';
import { defineConfig } from 'vitest/config';

const LOADER = `
const packed = Uint8Array.from(atob(document.getElementById('packed').textContent), (letter) => letter.charCodeAt(0));
const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
const script = document.createElement('script');
script.textContent = await new Response(stream).text();
script.type = 'module';
document.head.append(script);
`;

const digest = (script: string) => `'sha256-${createHash('sha256').update(script).digest('base64')}'`;

/**
 * Packs the script, to half its size, and lets nothing else run: the policy lists the digests of the loader and of what it
 * unpacks, so that nothing in the data block can become a script. fflate gives the same bytes on every machine; zlib does not.
 */
function pack(): Plugin {
  return {
    name: 'pack',
    enforce: 'post',
    generateBundle: {
      order: 'post', // when viteSingleFile has put the script in
      handler(_, bundle) {
        for (const file of Object.values(bundle)) {
          if (file.type !== 'asset' || !file.fileName.endsWith('.html')) continue;
          const html = String(file.source);
          const scripts = [...html.matchAll(/<script type="module"[^>]*>([\s\S]*?)<\/script>/g)];
          if (scripts.length !== 1) throw new Error(`expected one script in ${file.fileName}, got ${scripts.length}`);
          const [tag, script] = scripts[0];
          const packed = Buffer.from(deflateSync(Buffer.from(script), { level: 9 })).toString('base64');
          file.source = html
            .replace("script-src 'self'", `script-src ${digest(LOADER)} ${digest(script)}`)
            .replace(tag, '')
            .replace(
              '</body>',
              () =>
                `<script type="text/plain" id="packed">${packed}</script><script type="module">${LOADER}</script></body>`,
            );
        }
      },
    },
  };
}

/** Lists the packages that the page has code of: CycloneDX, which the wheel carries (PEP 770). The same bytes on every machine. */
function bill(): Plugin {
  return {
    name: 'bill',
    generateBundle: {
      order: 'pre', // while its modules are told apart
      handler(_, bundle) {
        const folders = Object.values(bundle)
          .flatMap((file) => (file.type === 'chunk' ? Object.entries(file.modules) : []))
          .filter(([, { renderedLength }]) => renderedLength > 0)
          .map(([path]) => /.*\/node_modules\/(@[^/]+\/)?[^/]+/.exec(path)?.[0])
          .filter((folder) => folder !== undefined);
        const components = [...new Set(folders)].sort().map((folder) => {
          const { name, version, license } = JSON.parse(readFileSync(`${folder}/package.json`, 'utf8'));
          const purl = `pkg:npm/${name.replace('@', '%40')}@${version}`;
          return { type: 'library', name, version, licenses: [{ license: { id: license } }], purl, 'bom-ref': purl };
        });
        const metadata = { component: { type: 'file', name: 'zeroshard/explain/page.html' } };
        const told = { bomFormat: 'CycloneDX', specVersion: '1.6', version: 1, metadata, components };
        this.emitFile({ type: 'asset', fileName: 'page.cdx.json', source: `${JSON.stringify(told, null, 2)}\n` });
      },
    },
  };
}

/** A component's class, in few letters. The first ones of a hash are far from evenly spread, so two components once shared one. */
const classes = new Map<string, string>();
function cssHash({ hash, css }: { hash: (text: string) => string; css: string }): string {
  const name = `z${hash(css).slice(-4)}`;
  if ((classes.get(name) ?? css) !== css) throw new Error(`two components have the class ${name}`);
  classes.set(name, css);
  return name;
}

/** While developing, the data block is a fixture: DATA=fixtures/run.json npm run dev. */
function fixture(): Plugin {
  return {
    name: 'fixture',
    apply: 'serve',
    transformIndexHtml: (html) =>
      html
        .replace(/<meta http-equiv="Content-Security-Policy"[^>]*>/, '')
        .replace('>null<', () => `>${readFileSync(process.env.DATA ?? 'fixtures/walkthroughs.json', 'utf8')}<`),
  };
}

export default defineConfig({
  plugins: [
    svelte({
      // Styles of components are packed with the script; app.css is not, and gives the first frame its colours.
      compilerOptions: { runes: true, discloseVersion: false, css: 'injected', cssHash },
    }),
    fixture(),
    bill(),
    viteSingleFile({ removeViteModuleLoader: true }),
    pack(),
  ],
  build: { target: 'es2022', modulePreload: false, reportCompressedSize: false },
  test: { include: ['tests/**/*.test.ts'] },
});
