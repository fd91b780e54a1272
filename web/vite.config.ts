import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { svelte } from '@sveltejs/vite-plugin-svelte';
import type { Plugin } from 'vite';
import { viteSingleFile } from 'vite-plugin-singlefile';
import { defineConfig } from 'vitest/config';

/** Only the page's own script may run, whatever the data block holds: its digest goes into the policy. */
function policy(): Plugin {
  return {
    name: 'policy',
    enforce: 'post',
    generateBundle: {
      order: 'post', // when viteSingleFile has put the script in
      handler(_, bundle) {
        for (const file of Object.values(bundle)) {
          if (file.type !== 'asset' || !file.fileName.endsWith('.html')) continue;
          const html = String(file.source);
          const scripts = [...html.matchAll(/<script type="module"[^>]*>([\s\S]*?)<\/script>/g)];
          if (scripts.length !== 1) throw new Error(`expected one script in ${file.fileName}, got ${scripts.length}`);
          const digest = createHash('sha256').update(scripts[0][1]).digest('base64');
          file.source = html.replace("script-src 'self'", `script-src 'sha256-${digest}'`);
        }
      },
    },
  };
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
      compilerOptions: { runes: true, discloseVersion: false, cssHash: ({ hash, css }) => `z${hash(css).slice(0, 3)}` },
    }),
    fixture(),
    viteSingleFile({ removeViteModuleLoader: true }),
    policy(),
  ],
  build: { target: 'es2022', modulePreload: false, reportCompressedSize: false },
  test: { include: ['tests/**/*.test.ts'] },
});
