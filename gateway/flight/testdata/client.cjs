// A Flight client of the npm packages apache-arrow and @grpc/grpc-js, with SQL by DuckDB: it puts people, reads orders and people by ranges,
// and joins them. Arguments: address, token.
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const arrow = require('apache-arrow');

const { FlightService } = grpc.loadPackageDefinition(loader.loadSync(path.join(__dirname, 'flight.proto'), { keepCase: true })).arrow.flight.protocol;
const client = new FlightService(process.argv[2], grpc.credentials.createInsecure(), { 'grpc.max_receive_message_length': 64 << 20 });
const metadata = new grpc.Metadata();
if (process.argv[3]) metadata.set('authorization', 'Bearer ' + process.argv[3]);

// frame is a message of Flight as a message of an Arrow stream.
function frame(data) {
  const size = Math.ceil(data.data_header.length / 8) * 8;
  const out = Buffer.alloc(8 + size);
  out.writeInt32LE(-1, 0);
  out.writeInt32LE(size, 4);
  data.data_header.copy(out, 8);
  return Buffer.concat([out, data.data_body ?? Buffer.alloc(0)]);
}

// messages are those of an Arrow stream as messages of Flight.
function messages(stream) {
  const out = [];
  const bytes = Buffer.from(stream);
  for (let at = 0; at + 8 <= bytes.length;) {
    const size = bytes.readInt32LE(at + 4);
    if (size === 0) break;
    const header = bytes.subarray(at + 8, at + 8 + size);
    const body = Number(arrow.Message.decode(new Uint8Array(header)).bodyLength);
    at += 8 + size;
    out.push({ data_header: header, data_body: bytes.subarray(at, at + body) });
    at += body;
  }
  return out;
}

// read returns the entries of all ranges of a tree.
async function read(command) {
  const info = await new Promise((done, failed) =>
    client.GetFlightInfo({ type: 'CMD', cmd: Buffer.from(JSON.stringify(command)) }, metadata, (err, info) => (err ? failed(err) : done(info))));
  const entries = [];
  for (const { ticket } of info.endpoint) {
    const parts = [];
    for await (const data of client.DoGet(ticket, metadata)) parts.push(frame(data));
    parts.push(Buffer.from([255, 255, 255, 255, 0, 0, 0, 0]));
    for (const row of arrow.tableFromIPC(Buffer.concat(parts))) entries.push([text(row.key), text(row.value)]);
  }
  return { ranges: info.endpoint.length, entries };
}

const text = (bytes) => Buffer.from(bytes).toString();

// put puts entries and returns the acknowledgements.
async function put(tree, entries) {
  const table = new arrow.Table({
    key: arrow.vectorFromArray(entries.map((e) => Buffer.from(e[0])), new arrow.Binary()),
    value: arrow.vectorFromArray(entries.map((e) => Buffer.from(e[1])), new arrow.Binary()),
  });
  const call = client.DoPut(metadata);
  const all = messages(arrow.tableToIPC(table, 'stream'));
  all[0].flight_descriptor = { type: 'PATH', path: [tree] };
  for (const m of all) call.write(m);
  call.end();
  const acks = [];
  for await (const { app_metadata } of call) acks.push(JSON.parse(app_metadata));
  return acks;
}

// join has DuckDB add up the orders of each city.
async function join(people, orders) {
  const { DuckDBInstance } = require('@duckdb/node-api');
  const db = await (await DuckDBInstance.create(':memory:')).connect();
  for (const [name, rows] of [['people', people], ['orders', orders]]) {
    await db.run(`create table ${name} (key varchar, value varchar)`);
    const to = await db.createAppender(name);
    for (const [key, value] of rows) {
      to.appendVarchar(key);
      to.appendVarchar(value);
      to.endRow();
    }
    to.closeSync();
  }
  const answer = await db.runAndReadAll(`select p.value as city, sum(cast(o.value as integer))::integer as total
    from orders o join people p on p.key = split_part(o.key, '/', 1) group by all order by city`);
  return answer.getRowsJson();
}

(async () => {
  const acks = await put('people', Array.from({ length: 100 }, (_, i) => [`p${i % 100}`, `city ${i % 3}`]));
  const people = await read({ tree: 'people' });
  const orders = await read({ tree: 'orders', parts: 4 });
  console.log(JSON.stringify({ acks, ranges: orders.ranges, people: people.entries.length, orders: orders.entries.length, totals: await join(people.entries, orders.entries) }));
  client.close();
})().catch((err) => {
  console.error(err);
  process.exit(1);
});
