// Answers lines "get KEY" and "hgetall KEY" by a stock client with client-side caching: the value, and how often its cache had it.
const { createClient, BasicClientSideCache } = require('redis');
const readline = require('readline');
(async () => {
  const [host, port] = process.argv[2].split(':');
  const cache = new BasicClientSideCache({ ttl: 0, maxEntries: 0, recordStats: true });
  const client = createClient({ RESP: 3, socket: { host, port: Number(port) }, clientSideCache: cache });
  client.on('error', (e) => { console.error(e); process.exit(1); });
  await client.connect();
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [command, key] = line.split(' ');
    const value = command === 'get' ? await client.get(key) : await client.hGetAll(key);
    console.log(JSON.stringify({ value, hits: cache.stats().hitCount }));
  }
  await client.close();
})().catch((e) => { console.error(e); process.exit(1); });
