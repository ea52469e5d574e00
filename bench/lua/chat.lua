-- A chat request of 1.3 KB whose user text differs each time behind a shared system prompt.
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local system = string.rep("You are a helpful assistant. ", 40)
local n = 0
request = function()
  n = n + 1
  local user = "question number " .. n .. " about the weather in the mountains and the price of tea, please answer in one sentence"
  return wrk.format(nil, nil, nil, '{"model":"m","messages":[{"role":"system","content":"' .. system .. '"},{"role":"user","content":"' .. user .. '"}],"stream":false}')
end
